"""Importer for classifiers from timm: a file with weights, for the network that the setting `network` selects."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import Tensor

from paceline.contracts.data_spec import DataSpec
from paceline.contracts.importer import Importer
from paceline.core.errors import UserError
from paceline.core.types import SettingValue
from paceline.models.networks import NetworkChoice, load_classifiers
from paceline.models.torch_file import read_state_dict

ARGUMENTS = "network_args."


class TimmClassifier(Importer):
    """The weights of a classifier. Their shapes determine the number of classes and the input channels."""

    def __init__(self, paths: Sequence[Path]) -> None:
        if len(paths) != 1:
            raise UserError(f"import: expected one file with a classifier, got {len(paths)}; import them one at a time")
        (self.path,) = paths
        self.state = read_state_dict(self.path)
        self.imported: dict[str, Tensor] = {}

    def data_spec(self, settings: Mapping[str, SettingValue]) -> DataSpec:
        name = str(settings["network"])
        if not name:
            raise UserError(f"{self.path}: the file does not name its network; use --set network=timm:NAME")
        arguments = {key.removeprefix(ARGUMENTS): value for key, value in settings.items() if key.startswith(ARGUMENTS)}
        choice = NetworkChoice(name, arguments)
        provider = load_classifiers(choice.name)
        task = provider.describe_weights(choice, self.state, int(str(settings["size"])))
        network = provider.make_pretrained(choice, task, self.state)
        self.imported = {f"classifier.{key}": tensor for key, tensor in network.state_dict().items()}
        return DataSpec(task.in_channels, task.height, task.width, num_classes=task.num_classes)

    def tensors(self, own: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return self.imported
