"""Sums across processes, using the fastest collective for the tensor size, and the time spent waiting for them."""

from __future__ import annotations

from time import perf_counter

import torch.distributed as dist
from torch import Tensor

from paceline.core.flight_recorder import start_operation

SMALL_BYTES = 2**16


class Waiting:
    """The time that this process has spent in collectives on the CPU since the start.

    A GPU runs collectives while the host continues, so their time is not included.
    """

    def __init__(self) -> None:
        self.seconds = 0.0


waiting = Waiting()


def sum_over_processes(own: Tensor, what: str = "sum") -> Tensor:
    """Return the sum of all processes' tensors on every process; `own` may be overwritten.

    Small CPU tensors are gathered and added in rank order, because gloo's all_reduce takes several times as long.
    `what` is the name of the operation in the flight recorder.
    """
    start_operation(what)
    if own.device.type != "cpu":
        dist.all_reduce(own)
        return own
    began = perf_counter()
    if own.numel() * own.element_size() > SMALL_BYTES:
        dist.all_reduce(own)
        waiting.seconds += perf_counter() - began
        return own
    size = dist.get_world_size()
    parts = own.new_empty(size * own.numel())
    dist.all_gather_into_tensor(parts, own.detach().flatten())
    waiting.seconds += perf_counter() - began
    return parts.view(size, *own.shape).sum(0, dtype=own.dtype)
