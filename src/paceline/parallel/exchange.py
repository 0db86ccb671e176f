"""Sums over processes, by the exchange that is quickest for them."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

SMALL_BYTES = 2**16


def sum_over_processes(own: Tensor) -> Tensor:
    """The sum of every process's tensor, on each; `own` may be overwritten.

    A few numbers on CPUs are gathered and added in the order of ranks: gloo takes several times as long to reduce them.
    """
    if own.device.type != "cpu" or own.numel() * own.element_size() > SMALL_BYTES:
        dist.all_reduce(own)
        return own
    size = dist.get_world_size()
    parts = own.new_empty(size * own.numel())
    dist.all_gather_into_tensor(parts, own.detach().flatten())
    return parts.view(size, *own.shape).sum(0, dtype=own.dtype)
