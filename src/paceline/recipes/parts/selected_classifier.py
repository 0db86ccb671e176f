"""A classifier from another library, selected with the settings `network` and `network_args`."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from paceline.contracts.data_spec import DataSpec
from paceline.core.types import SettingValue
from paceline.models import networks
from paceline.models.input_scaling import InputScaling
from paceline.models.network_choice import NetworkChoice, NetworkTask

PREFIX = "classifier."  # the recipe's name for the network, in the names of its tensors
PRETRAINED = "pretrained"  # the argument that requests published weights


class SelectedClassifier:
    """Creates the network for a data spec, with random or published weights."""

    def __init__(self, name: str, arguments: Mapping[str, SettingValue], spec: DataSpec) -> None:
        self.choice = NetworkChoice(name, arguments)
        self.task = NetworkTask(spec.channels, spec.height, spec.width, num_classes=spec.num_classes)

    @property
    def is_pretrained(self) -> bool:
        """Whether the arguments request published weights."""
        return self.choice.arguments.get(PRETRAINED) is True

    def make_network(self) -> nn.Module:
        """Return the network with random weights."""
        return networks.make_network(self.choice, self.task)

    def make_input_scaling(self) -> nn.Module:
        """Return a module that scales images in [-1, 1] to the values that the network expects."""
        return InputScaling(*networks.input_statistics(self.choice), self.task.in_channels)

    def published_weights(self) -> dict[str, Tensor]:
        """Return the provider's weights, downloaded if necessary."""
        return self._pretrained(None)

    def adopt_weights(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the weights in a file of the provider; raise UserError if they belong to a different network."""
        return self._pretrained(tensors)

    def _pretrained(self, tensors: dict[str, Tensor] | None) -> dict[str, Tensor]:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(torch.initial_seed())  # the same seed on every rank, for a last layer that is new
            network = networks.make_pretrained(self.choice, self.task, tensors)
        return {f"{PREFIX}{name}": tensor for name, tensor in network.state_dict().items()}
