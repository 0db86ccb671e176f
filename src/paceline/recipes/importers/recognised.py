"""Importer for networks that another library recognises from the names and shapes of their tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import Tensor

from paceline.contracts.data_spec import DataSpec
from paceline.contracts.importer import Importer, only_path
from paceline.core.errors import UserError
from paceline.core.types import SettingValue
from paceline.models.networks import first_keys, missing_recognisers, recognise
from paceline.models.torch_file import read_state_dict

CROP_PX = 64  # size of the network's input in the data spec; the network accepts images of any size
OTHERS = (
    "use --recipe super_resolution for an SRGAN generator, --recipe translation for pix2pix and DeepLIIF, "
    "and --recipe classification --set network=timm:NAME for a classifier from timm"
)


class RecognisedFile(Importer):
    """A restoration or super-resolution network. Its architecture and its settings are inferred from its tensors."""

    def __init__(self, paths: Sequence[Path]) -> None:
        path = only_path(paths, "one network")
        state = read_state_dict(path)
        found = recognise(state, str(path))
        if found is None:
            advice = OTHERS + missing_recognisers()
            raise UserError(f"{path}: its network is not recognised {first_keys(state)}; {advice}")
        self.network = found
        self.recipe, part = ("super_resolution", "generator") if found.scale > 1 else ("restoration", "restorer")
        arguments = {f"network_args.{name}": value for name, value in found.arguments.items()}
        self.recognised = {
            "network": found.network,
            **arguments,
            **({"scale": str(found.scale)} if found.scale > 1 else {}),
        }
        self.imported = {f"{part}.{name}": tensor for name, tensor in found.tensors.items()}

    def data_spec(self, settings: Mapping[str, SettingValue]) -> DataSpec:
        side = CROP_PX * self.network.scale
        return DataSpec(self.network.channels, side, side)

    def tensors(self, own: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return self.imported
