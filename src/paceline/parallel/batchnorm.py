"""BatchNorm over all processes, on any device and dtype, differentiable as often as one likes.

torch's SyncBatchNorm refuses CPU tensors and has no double backward; it is used where it can be,
since it is faster on GPUs, and this one elsewhere.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm


class _SumOverProcesses(torch.autograd.Function):
    """All-reduce whose gradient is an all-reduce, and so on for higher derivatives."""

    @staticmethod
    def forward(ctx, tensor: Tensor) -> Tensor:
        total = tensor.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        return _SumOverProcesses.apply(gradient.contiguous())


class SynchronizedBatchNorm(_BatchNorm):
    """A BatchNorm whose statistics are those of the global batch."""

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected at least 2 dimensions, got {input.dim()}")

    def forward(self, input: Tensor) -> Tensor:
        if not self.training:
            return super().forward(input)
        self._check_input_dim(input)
        x = input.float() if input.dtype in (torch.float16, torch.bfloat16) else input
        channels = [1, -1] + [1] * (x.dim() - 2)
        over = [0, *range(2, x.dim())]
        count = x.new_full((1, x.shape[1]), x.numel() / x.shape[1])
        sums, counts = _SumOverProcesses.apply(torch.cat([x.sum(over)[None], count])).unbind()
        mean = sums / counts
        # Squares around the mean itself: the mean of squares less the square of the mean cancels in float32.
        centred = x - mean.view(channels)
        variance = _SumOverProcesses.apply((centred * centred).sum(over)) / counts
        self._update_running(mean.detach(), variance.detach(), counts.detach())
        scaled = centred * (variance + self.eps).rsqrt().view(channels)
        if self.affine:
            scaled = scaled * self.weight.view(channels) + self.bias.view(channels)
        return scaled.to(input.dtype)

    @torch.no_grad()
    def _update_running(self, mean: Tensor, variance: Tensor, counts: Tensor) -> None:
        if not self.track_running_stats or self.running_mean is None or self.running_var is None:
            return
        assert self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        momentum = self.momentum if self.momentum is not None else 1.0 / float(self.num_batches_tracked)
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), momentum)
        self.running_var.lerp_((variance * counts / (counts - 1)).to(self.running_var.dtype), momentum)


def has_batchnorm(module: nn.Module) -> bool:
    """Whether a BatchNorm is anywhere in a module."""
    return any(isinstance(inner, _BatchNorm) for inner in module.modules())


def synchronize(module: nn.Module, *, ours: bool) -> nn.Module:
    """The module with each BatchNorm taken over all processes: by our own class, or by torch's."""
    if not ours:
        return nn.SyncBatchNorm.convert_sync_batchnorm(module)
    if isinstance(module, _BatchNorm):
        return _synchronized_twin(module)
    for name, child in module.named_children():
        setattr(module, name, synchronize(child, ours=True))
    return module


def _synchronized_twin(norm: _BatchNorm) -> SynchronizedBatchNorm:
    twin = SynchronizedBatchNorm(norm.num_features, norm.eps, norm.momentum, norm.affine, norm.track_running_stats)
    for name, parameter in norm.named_parameters(recurse=False):
        setattr(twin, name, parameter)
    for name, buffer in norm.named_buffers(recurse=False):
        setattr(twin, name, buffer)
    return twin.train(norm.training)
