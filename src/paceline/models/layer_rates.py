"""Layer-wise learning rate decay: the closer a layer is to the input, the lower its learning rate."""

from __future__ import annotations

import importlib
from typing import Any, Protocol, runtime_checkable

from torch import nn


@runtime_checkable
class HasLayerPatterns(Protocol):
    """A network from timm, which declares which parameters belong to which layer."""

    def group_matcher(self, coarse: bool = False) -> Any:
        """Return timm's patterns for the names of the parameters in each layer."""


def relative_rates(network: nn.Module, decay: float) -> dict[str, float]:
    """Return the learning rate of each parameter relative to the last layer's: decay ** (layers after it)."""
    if decay == 1:
        return {}
    layers = layer_numbers(network)
    last = max(layers.values(), default=0)
    return {name: decay ** (last - number) for name, number in layers.items()}


def layer_numbers(network: nn.Module) -> dict[str, int]:
    """Return the number of the layer that each parameter belongs to, counted from the input.

    The layers of a network from timm are its blocks. In any other network, each direct submodule with parameters is a
    layer.
    """
    if isinstance(network, HasLayerPatterns):
        models: Any = importlib.import_module("timm.models")
        patterns = network.group_matcher(coarse=False)
        numbers: dict[str, int] = models.group_parameters(network, patterns, reverse=True)
        return numbers
    names = [name for name, _ in network.named_parameters()]
    order = {child: number for number, child in enumerate(dict.fromkeys(name.partition(".")[0] for name in names))}
    return {name: order[name.partition(".")[0]] for name in names}
