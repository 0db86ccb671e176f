"""Check that all ranks hold bit-identical weights. Sharded weights have no replicas to compare."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from paceline.contracts.recipe import Recipe
from paceline.parallel.shards import is_sharded
from paceline.parallel.world import World


def check_replicas(recipe: Recipe, world: World) -> None:
    """Raise RuntimeError if the weights of a network differ between ranks."""
    networks = recipe.single_networks
    rows = world.gather(torch.stack([_checksum(network) for network in networks.values()]))
    for name, column in zip(networks, rows.unbind(1), strict=True):
        if (column != column[0]).any():
            ranks = [rank for rank, value in enumerate(column.tolist()) if value != column[0].item()]
            raise RuntimeError(f"the replicas of network {name!r} differ: ranks {ranks} do not match rank 0")


def _checksum(network: nn.Module) -> Tensor:
    """Return a sum over the bit patterns of all parameters that are not sharded, weighted by position."""
    total = torch.zeros((), dtype=torch.int64, device=next(network.parameters()).device)
    replicated = (parameter for parameter in network.parameters() if not is_sharded(parameter))
    for number, parameter in enumerate(replicated, start=1):
        bits = parameter.detach().contiguous().view(torch.int32).flatten().long()
        total += number * (bits * torch.arange(1, bits.numel() + 1, device=bits.device)).sum()
    return total
