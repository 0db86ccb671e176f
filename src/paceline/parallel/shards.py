"""Tensors whose rows are divided among the processes (torch's DTensor), for FSDP."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from paceline.core.errors import UserError

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


class _Allocating:
    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return a buffer for a collective."""
        return torch.empty(*size, dtype=dtype, device=device)


class StagedAllGather(_Allocating):
    """Gathers the parts of a block's weights through host memory."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> None:
        """Fill `output_tensor` with the parts of all processes; `async_op` is ignored."""
        whole = torch.empty(output_tensor.shape, dtype=output_tensor.dtype)
        dist.all_gather_into_tensor(whole, input_tensor.cpu(), group=group)
        output_tensor.copy_(whole)


class StagedReduceScatter(_Allocating):
    """Adds up or averages gradients through host memory; each process receives its own part."""

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp | dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> None:
        """Fill `output_tensor` with this process's part of the reduced `input_tensor`; `async_op` is ignored."""
        part = torch.empty(output_tensor.shape, dtype=output_tensor.dtype)
        dist.reduce_scatter_tensor(part, input_tensor.cpu(), op=dist.ReduceOp.SUM, group=group)
        if op == dist.ReduceOp.AVG:
            part /= group.size()
        output_tensor.copy_(part)


class RejectPenalty(TorchFunctionMode):
    """A context in which `torch.autograd.grad(..., create_graph=True)` raises a UserError.

    The context makes every operation slower, so use it only for the first forward pass of a phase.
    """

    def __init__(self, message: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call, unused-ignore]
        self._message = message

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        given = kwargs or {}
        if func is torch.autograd.grad and given.get("create_graph"):
            raise UserError(self._message)
        return func(*args, **given)
