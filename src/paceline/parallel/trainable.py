"""The trainable parameters of each network, and which of them currently require grad."""

from __future__ import annotations

from torch import nn

from paceline.contracts.recipe import Recipe


class Trainable:
    """The trainable parameters by network. While a phase runs, only those of its network require grad."""

    def __init__(self, recipe: Recipe) -> None:
        # Parameters that the recipe froze stay frozen.
        self.parameters: dict[str, list[nn.Parameter]] = {
            name: [parameter for parameter in network.parameters() if parameter.requires_grad]
            for name, network in recipe.networks.items()
        }
        self._selected: str | None = None

    def select(self, network: str) -> None:
        """Make only one network's parameters require grad."""
        if network == self._selected:
            return
        self._selected = network
        for name, parameters in self.parameters.items():
            for parameter in parameters:
                parameter.requires_grad_(name == network)

    def release(self) -> None:
        """Make the trainable parameters of all networks require grad."""
        self._selected = None
        for parameters in self.parameters.values():
            for parameter in parameters:
                parameter.requires_grad_(True)
