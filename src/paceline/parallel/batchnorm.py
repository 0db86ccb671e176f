"""BatchNorm across all processes, on any device and dtype, with derivatives of any order."""

from __future__ import annotations

from functools import cache
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.core.watch import start_operation
from paceline.models.layers import NormByImage
from paceline.parallel.torch_internals import AnyBatchNorm

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


class _SumOverProcesses(torch.autograd.Function):
    """A sum across processes whose gradient is also a sum across processes, for derivatives of any order."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return sum_over_processes(tensor.clone(), "BatchNorm")

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return _sum_over_processes(gradient)


def _sum_over_processes(tensor: Tensor) -> Tensor:
    summed: Tensor = _SumOverProcesses.apply(tensor.contiguous())
    return summed


class SynchronizedBatchNorm(AnyBatchNorm):
    """A BatchNorm that uses the statistics of the global batch."""

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected at least 2 dimensions, got {input.dim()}")

    def forward(self, input: Tensor) -> Tensor:
        if not self.training:
            return super().forward(input)
        self._check_input_dim(input)
        x = input.float() if input.dtype in (torch.float16, torch.bfloat16) else input
        x = x.contiguous(memory_format=_layout(x))
        normalize = _ByKernels.apply if x.device.type == "cpu" else _by_definition
        weight, bias = (None if part is None else part.to(x.dtype) for part in (self.weight, self.bias))
        normal, mean, variance, count = normalize(x, weight, bias, self.eps)
        self._update_running(mean, variance, count)
        return normal.to(input.dtype)

    @torch.no_grad()
    def _update_running(self, mean: Tensor, variance: Tensor, count: Tensor) -> None:
        if not self.track_running_stats or self.running_mean is None or self.running_var is None:
            return
        assert self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        momentum = self.momentum if self.momentum is not None else 1.0 / float(self.num_batches_tracked)
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), momentum)
        self.running_var.lerp_((variance * count / (count - 1)).to(self.running_var.dtype), momentum)


class _ThenSubmodules(nn.Module):
    """Applies a BatchNorm, and then its submodules in order."""

    def forward(self, input: Tensor) -> Tensor:
        result: Tensor = super().forward(input)
        for module in self.children():
            result = module(result)
        return result


def _by_definition(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> tuple[Tensor, ...]:
    """Compute BatchNorm from its definition, differentiably; return the output, batch mean, variance and count."""
    channels, over = _shape(x), [0, *range(2, x.dim())]
    own_count = x.new_full((1, x.shape[1]), x.numel() / x.shape[1])
    sums, count = _SumOverProcesses.apply(torch.cat([x.sum(over)[None], own_count])).unbind()
    mean = sums / count
    # Use squared deviations, because the mean of squares minus the squared mean loses precision in float32.
    centered = x - mean.view(channels)
    variance = _SumOverProcesses.apply((centered * centered).sum(over)) / count
    normal = centered * (variance + eps).rsqrt().view(channels)
    if weight is not None:
        normal = normal * weight.view(channels)
    if bias is not None:
        normal = normal + bias.view(channels)
    return normal, mean.detach(), variance.detach(), count.detach()


class _ByKernels(torch.autograd.Function):
    """Like `_by_definition`, but faster: torch's CPU kernels need fewer passes over the data and less communication."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> tuple[Tensor, ...]:
        mean, variance, count = _statistics(x)
        ctx.save_for_backward(x, weight, bias, mean, variance, count)
        ctx.eps = eps
        ctx.mark_non_differentiable(mean, variance, count)
        return F.batch_norm(x, mean, variance, weight, bias, False, 0.0, eps), mean, variance, count

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, mean, variance, count = ctx.saved_tensors
        if torch.is_grad_enabled():  # a double backward is requested
            return *_gradients_by_definition(ctx, x, weight, bias, gradient), None
        gradient = gradient.contiguous(memory_format=_layout(x))
        _, of_weight, of_bias = torch.ops.aten.native_batch_norm_backward(
            gradient, x, weight, mean, variance, None, None, False, ctx.eps, [False, True, True]
        )
        of_x = None
        if ctx.needs_input_grad[0]:
            sums = sum_over_processes(torch.cat([of_weight, of_bias]), "BatchNorm, backward")
            root = (variance + ctx.eps).rsqrt()
            scale = root if weight is None else root * weight
            along_normal, along_one = (-scale * (sums / count).view(2, -1)).unbind()
            # The contribution of mean and variance is linear in the normalised x, so the forward kernel computes it.
            of_x = F.batch_norm(x, mean, variance, along_normal, along_one, False, 0.0, ctx.eps)
            of_x.addcmul_(gradient, scale.view(_shape(x)))
        return of_x, of_weight if weight is not None else None, of_bias if bias is not None else None, None


def _statistics(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the global batch's mean and variance per channel, and its count; float64 sums avoid cancellation."""
    own_mean, own_variance = (part.double() for part in torch.batch_norm_update_stats(x, None, None, 0.0))
    own_count = own_mean.new_full((1,), x.numel() / x.shape[1])
    own_squares = own_variance + own_mean.square()
    sums = sum_over_processes(torch.cat([own_count, own_count * own_mean, own_count * own_squares]), "BatchNorm")
    count = sums[0]
    mean, squares = (sums[1:] / count).chunk(2)
    variance = (squares - mean.square()).clamp_min(0)
    return mean.to(x.dtype), variance.to(x.dtype), count.to(x.dtype)


def _gradients_by_definition(
    ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, gradient: Tensor
) -> list[Tensor | None]:
    """Return differentiable gradients with respect to x, weight and bias."""
    needed = ctx.needs_input_grad[:3]
    if weight is not None and needed[1] and not weight.requires_grad:  # the weight was frozen after the forward pass
        weight = weight.detach().requires_grad_()
    if bias is not None and needed[2] and not bias.requires_grad:
        bias = bias.detach().requires_grad_()
    normal = _by_definition(x, weight, bias, ctx.eps)[0]
    parts = zip((x, weight, bias), needed, strict=True)
    inputs = [part for part, is_needed in parts if part is not None and is_needed]
    gradients = iter(torch.autograd.grad(normal, inputs, gradient, create_graph=True))
    return [next(gradients) if is_needed else None for is_needed in needed]


def _shape(x: Tensor) -> list[int]:
    """Return the shape in which a per-channel vector broadcasts against x."""
    return [1, -1] + [1] * (x.dim() - 2)


def _layout(x: Tensor) -> torch.memory_format:
    """Return the memory format of x."""
    last = x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last)
    return torch.channels_last if last else torch.contiguous_format


def has_batchnorm(module: nn.Module) -> bool:
    """Return whether a module contains a BatchNorm."""
    return any(isinstance(inner, AnyBatchNorm) for inner in module.modules())


def synchronize(module: nn.Module, *, ours: bool) -> nn.Module:
    """Synchronise each BatchNorm of a module across processes, using Paceline's class or torch's; return the module.

    Only the class of a BatchNorm changes. A BatchNorm that a network uses under several names stays one module, which
    keeps its hooks and attributes.
    """
    for norm in [inner for inner in module.modules() if isinstance(inner, AnyBatchNorm) and not _is_frozen(inner)]:
        if not ours:
            vars(norm).setdefault("process_group", None)  # the only attribute that torch's class adds
        norm.__class__ = _synchronized_class(norm, ours)
        vars(norm).pop("forward", None)  # a `forward` stored in the object would take precedence
    return module


def _synchronized_class(norm: AnyBatchNorm, ours: bool) -> type[AnyBatchNorm]:
    kind = SynchronizedBatchNorm if ours else nn.SyncBatchNorm
    if isinstance(norm, NormByImage):  # in eval mode, each image is normalised using its own statistics
        return _combined(NormByImage, kind)
    if any(norm.children()):  # modules that are applied to the result, such as the activation in timm's BatchNormAct2d
        return _combined(_ThenSubmodules, kind)
    return kind


@cache
def _combined(first: type[nn.Module], kind: type[AnyBatchNorm]) -> type[AnyBatchNorm]:
    """Return a synchronised BatchNorm that also does what another class does."""
    return type(f"{first.__name__}{kind.__name__}", (first, kind), {})


def leave_batchnorm_eager(module: nn.Module) -> None:
    """Exclude each synchronised BatchNorm from compilation.

    torch.compile cannot trace communication. It would divide every BatchNorm into many small parts and compile each of
    them again for every shape.
    """
    for norm in _synchronized(module):
        if not isinstance(norm, _Eager):
            kind: Any = type(norm)
            norm.__class__ = _eager_class(kind)


def is_synchronized(module: nn.Module) -> bool:
    """Return whether a module contains a synchronised BatchNorm."""
    return bool(_synchronized(module))


def _synchronized(module: nn.Module) -> list[nn.Module]:
    return [inner for inner in module.modules() if isinstance(inner, SynchronizedBatchNorm | nn.SyncBatchNorm)]


class _Eager(nn.Module):
    """Base of the BatchNorm classes that are excluded from compilation."""


@cache
def _eager_class(norm: type[nn.Module]) -> type[nn.Module]:
    # A new class, because a `forward` stored in the object would still belong to the original after a deepcopy.
    return type(norm.__name__, (norm, _Eager), {"forward": torch.compiler.disable(norm.forward)})


def _is_frozen(norm: AnyBatchNorm) -> bool:
    """Return whether a BatchNorm stays in eval mode during training, so that it computes no statistics."""
    mode = norm.training
    is_frozen = not norm.train().training
    norm.train(mode)
    return is_frozen
