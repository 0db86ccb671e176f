"""Tensors whose rows are divided among the processes (torch's DTensor), and how to read and fill them.

All functions also accept plain tensors, of which every process has all rows.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor, nn

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

DTENSOR_MODULE = "torch.distributed.tensor"


def is_sharded(tensor: Tensor) -> TypeGuard[DTensor]:
    """Return whether this process has only some of the tensor's rows.

    torch's module takes a second to import. Without it, no tensor is sharded.
    """
    module = sys.modules.get(DTENSOR_MODULE)
    return module is not None and isinstance(tensor, module.DTensor)


def own_rows(tensor: Tensor) -> Tensor:
    """Return this process's rows, which share memory with the tensor."""
    return (tensor.to_local() if is_sharded(tensor) else tensor).detach()


def first_row(tensor: Tensor) -> int:
    """Return the index of this process's first row; rows are divided like the chunks of `torch.chunk`."""
    if not is_sharded(tensor):
        return 0
    mesh, count = tensor.device_mesh, tensor.shape[0]
    first = min(mesh.get_local_rank() * -(-count // mesh.size()), count)
    assert first + len(tensor.to_local()) <= count
    return first


def gather_rows(tensor: Tensor) -> Tensor:
    """Return the whole tensor; every process must call this at the same time."""
    if not is_sharded(tensor):
        return tensor.detach()
    mesh, own = tensor.device_mesh, own_rows(tensor)
    rows = -(-len(tensor) // mesh.size())  # rows per process; the last processes may have fewer
    padded = own.new_zeros(rows, *own.shape[1:])
    padded[: len(own)] = own
    whole = own.new_empty(rows * mesh.size(), *own.shape[1:])
    dist.all_gather_into_tensor(whole, padded, group=mesh.get_group())
    return whole[: len(tensor)]


def select_rows(whole: Tensor, like: Tensor) -> Tensor:
    """Return the rows of a whole tensor that correspond to this process's rows of another tensor."""
    if not is_sharded(like):
        return whole
    first = first_row(like)
    return whole[first : first + len(own_rows(like))]


@torch.no_grad()
def fill_module(module: nn.Module, weights: Mapping[str, Tensor], unchanged: Collection[str] = ()) -> None:
    """Load whole tensors into a module whose parameters may be sharded; only those in `unchanged` may be missing."""
    own: dict[str, Tensor] = module.state_dict()
    if not any(is_sharded(tensor) for tensor in own.values()):
        module.load_state_dict({**{name: own[name] for name in unchanged}, **weights})
        return
    assert own.keys() == {*weights, *unchanged}
    for name, values in weights.items():
        own_rows(own[name]).copy_(select_rows(values, own[name]))
