"""FSDP's communication over gloo for tensors on a GPU, through host memory.

FSDP calls collectives on CUDA streams of its own. With gloo, the process then ends in a segmentation fault (measured
with torch 2.11). NCCL needs no staging, but it cannot run two processes on one GPU. torch does not export the base
classes of custom collectives, so these only have the same methods.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor


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
