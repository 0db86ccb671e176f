"""Importer for pix2pix and DeepLIIF weights: translates the names of their network files and tensors into Paceline's.

pix2pix calls its networks G and D. DeepLIIF numbers its modalities from 1 (G1, D1, …). A segmentation network's number
is one more than the last modality's, followed by a second digit for its input (G51: the image, G52: the first
modality). Later versions use the letter S and a number that starts at 0 (GS0: the image, GS1: the first modality).

pix2pix normalises using the test image's statistics (Isola et al. 2017, section 3.3), and so does DeepLIIF. Networks
with BatchNorm are therefore imported with `batchnorm=instance`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from torch import Tensor

from paceline.contracts.data_spec import DataSpec, output_panels
from paceline.contracts.importer import Importer
from paceline.core.errors import NOT_FOUND, UserError
from paceline.core.types import SettingValue
from paceline.models.torch_file import read_state_dict

FILE_NAME = re.compile(r"(?:.+_net_)?([GD])(S?)(\d*)\.pth")
GROUPS = {"G": "generators", "D": "discriminators"}
UNUSED = ("running_mean", "running_var", "num_batches_tracked")  # stored by old InstanceNorm layers but never used
CROP_PX = 512  # image size in the data spec if `crop` is not set; the networks accept any size


class DeepliifFiles(Importer):
    """pix2pix or DeepLIIF networks, one file each. The setting `panels` names the images that they generate."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self.files = {file.name: file for path in paths for file in _network_files(path)}
        self.networks = networks_of(self.files)
        if not self.networks:
            raise UserError(f"{paths[0]}: contains no files like latest_net_G.pth or latest_net_G1.pth")
        self.states = {name: read_state_dict(self.files[name]) for name in self.networks}
        # pix2pix and DeepLIIF normalise using the input image's statistics, not the running statistics.
        if any(
            key.endswith(".weight") and tensor.dim() == 1
            for state in self.states.values()
            for key, tensor in state.items()
        ):
            self.assumed = {"batchnorm": "instance"}

    def data_spec(self, settings: Mapping[str, SettingValue]) -> DataSpec:
        row = [name.strip() for name in str(settings.get("panels", "")).split(",")]
        panels = output_panels(filter(None, row))
        if not panels:
            raise UserError(
                "--set panels: list the input and the generated panels, e.g. --set panels=image,dapi,segmentation"
            )
        side = int(str(settings["crop"])) or CROP_PX
        return DataSpec(int(str(settings["channels"])) or 3, side, side, panels=panels)

    def tensors(self, own: Mapping[str, Tensor]) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for name, network in self.networks.items():
            file = self.files[name]
            for key, tensor in renamed(network, self.states[name], own).items():
                if key not in own or own[key].shape != tensor.shape:
                    ours = f"has shape {tuple(own[key].shape)}" if key in own else "does not exist"
                    raise UserError(
                        f"{file}: {key.removeprefix(network + '.')} has shape {tuple(tensor.shape)}, but {ours} in "
                        f"{network}; choose its architecture with --set (generator, norm, dropout, padding, ngf)"
                    )
                found[key] = tensor
        return found


def _network_files(path: Path) -> list[Path]:
    if path.is_dir():
        return sorted(path.glob("*.pth"))
    if not path.is_file():
        raise UserError(f"{path}: {NOT_FOUND}")
    return [path]


def networks_of(file_names: Iterable[str]) -> dict[str, str]:
    """Return Paceline's name for the network in each network file, e.g. `generators.GS0`."""
    parsed = {name: match.groups() for name in file_names if (match := FILE_NAME.fullmatch(name))}
    numbers = {number for _, letter, number in parsed.values() if not letter}
    alone = max((int(number[0]) - 1 for number in numbers if len(number) == 2), default=1)
    num_modalities = max((int(number) for number in numbers if len(number) == 1), default=alone)
    # Numbers after the letter S start at 0 or 1.
    first = min((int(number) for _, letter, number in parsed.values() if letter and number), default=0)
    found = {}
    for file_name, (kind, letter, number) in parsed.items():
        if letter and number:
            place = f"S{int(number) - min(first, 1)}"
        elif len(number) < 2:
            place = number or "1"
        elif number.startswith(str(num_modalities + 1)):
            place = f"S{int(number.removeprefix(str(num_modalities + 1))) - 1}"
        else:
            raise UserError(
                f"{file_name}: with {num_modalities} modalities, segmentation networks are called "
                f"{kind}{num_modalities + 1}1, {kind}{num_modalities + 1}2, …; use files from a single model"
            )
        found[file_name] = f"{GROUPS[kind]}.{kind}{place}"
    return found


def renamed(network: str, state: Mapping[str, Tensor], own: Iterable[str]) -> dict[str, Tensor]:
    """Return a file's tensors under the recipe's keys; `own` lists all of the recipe's keys."""
    known = set(own)
    result = {}
    for key, tensor in state.items():
        full = f"{network}.{key}"
        if full not in known and full.rpartition(".")[2] in UNUSED:
            continue
        result[full] = tensor
    return result
