"""The network of a recipe that maps images to images: one of its own, or one from another library."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import nn

from paceline.config.arguments import Arguments
from paceline.core.errors import UserError, unknown
from paceline.models.network_choice import NetworkChoice, NetworkTask
from paceline.models.networks import make_network


def make_image_network(
    name: str, arguments: Arguments, task: NetworkTask, own: Mapping[str, Callable[[], nn.Module]]
) -> nn.Module:
    """Return the recipe's own network of this name, or else the network `PROVIDER:NAME` with these arguments."""
    if ":" in name:
        return make_network(NetworkChoice(name, arguments), task)
    if name not in own:
        raise UserError(f"network={name}: {unknown('network', name, own)} Networks from spandrel: spandrel:NAME")
    if arguments:
        given = next(iter(arguments))
        raise UserError(f"network_args.{given}: only for networks from spandrel, not for network={name}; leave it out")
    return own[name]()
