"""The weights that are evaluated, sampled and saved for use: EMA weights, with BatchNorm statistics that suit them.

The running statistics of a BatchNorm layer are those of the latest weights. With averaged weights, the activations of a
network have a smaller variance. Combined with the running statistics, averaged weights can give useless predictions, so
the statistics are recomputed from training samples, which are the same in every process.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from paceline.models.layers import NormByImage
from paceline.parallel.torch_internals import AnyBatchNorm
from paceline.runs.weights import EMA
from paceline.training.compile import eager, keeping_buffers
from paceline.training.step import Step


@contextmanager
def evaluated_weights(step: Step) -> Iterator[None]:
    """Use EMA weights inside the context, for the networks that the recipe evaluates with an EMA.

    All processes must enter the context together. Inside it, each may call the networks without the others.
    """
    with ExitStack() as stack:
        for name in step.recipe.ema:
            if name in step.learners:
                stack.enter_context(step.learners[name].ema_weights())
        stack.enter_context(step.strategy.whole_weights())
        stack.enter_context(_recomputed_statistics(step))
        yield


def ema_statistics(step: Step) -> dict[str, Tensor]:
    """Return the BatchNorm statistics for EMA weights, by their names in a snapshot. All processes must call this."""
    norms = averaged_norms(step)
    if not norms:
        return {}
    with evaluated_weights(step):
        return {
            f"{EMA}{name}.{key}": norm.get_buffer(key).clone()
            for name, norm in norms.items()
            for key in ("running_mean", "running_var")
        }


def averaged_norms(step: Step) -> dict[str, AnyBatchNorm]:
    """Return the BatchNorm layers that use running statistics in evaluation, in networks with an EMA."""
    return {
        f"{network}.{name}": module
        for network in step.recipe.ema
        if network in step.learners and step.learners[network].ema
        for name, module in step.recipe.get_submodule(network).named_modules()
        if isinstance(module, AnyBatchNorm) and not isinstance(module, NormByImage) and module.running_mean is not None
    }


@contextmanager
def _recomputed_statistics(step: Step) -> Iterator[None]:
    """Inside the context, the BatchNorm layers of networks with an EMA have the statistics of the current weights."""
    norms = list(averaged_norms(step).values())
    if not norms:
        yield
        return
    with keeping_buffers(step.recipe):
        _recompute(step, norms)
        yield


@torch.no_grad()
def _recompute(step: Step, norms: list[AnyBatchNorm]) -> None:
    """Set the statistics to their means over batches of training samples."""
    was_training = step.recipe.training
    step.recipe.train()
    norms = [norm for norm in norms if norm.training]  # the others are frozen: training uses their statistics too
    step.recipe.eval()
    found: list[list[tuple[Tensor, Tensor]]] = [[] for _ in norms]
    handles = [
        norm.register_forward_pre_hook(partial(_use_own, into), with_kwargs=True)
        for norm, into in zip(norms, found, strict=True)
    ]
    try:
        for batch in step.first_batches:
            with eager(), step.strategy.precision.autocast():
                step.recipe.predict(step.finish(batch))
    finally:
        step.recipe.train(was_training)
        for handle in handles:
            handle.remove()
    for norm, statistics in zip(norms, found, strict=True):
        if statistics:  # predict may not use every layer
            _set(norm, *(torch.stack(values).mean(0) for values in zip(*statistics, strict=True)))


def _use_own(
    found: list[tuple[Tensor, Tensor]], norm: nn.Module, inputs: tuple[Tensor, ...], by_name: dict[str, Tensor]
) -> None:
    """Before a BatchNorm's forward pass, make it use the mean and variance of its input, as in training."""
    x = next(iter((*inputs, *by_name.values())))
    x = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
    is_single = x.numel() == x.shape[1]  # one value per channel: the unbiased variance would be NaN
    variance, mean = torch.var_mean(x, [0, *range(2, x.ndim)], correction=0 if is_single else 1)
    found.append((mean, variance))
    assert isinstance(norm, AnyBatchNorm)
    _set(norm, mean, variance)


def _set(norm: AnyBatchNorm, mean: Tensor, variance: Tensor) -> None:
    assert norm.running_mean is not None and norm.running_var is not None
    norm.running_mean.copy_(mean)
    norm.running_var.copy_(variance)
