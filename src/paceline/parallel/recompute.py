"""Activation checkpointing: store only the inputs of a network's blocks, and recompute the rest in the backward pass.

This saves memory at the cost of a second forward pass. The gradients are bit-identical to those without
recomputation: random numbers are repeated, and buffers such as BatchNorm's running statistics are updated only by the
first forward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from paceline.contracts.recipe import Recipe
from paceline.parallel.blocks import blocks_of

Buffers = list[tuple[nn.Module, str, Tensor]]
Mode = Callable[[], AbstractContextManager[object]]


def recompute_blocks(recipe: Recipe, mode: Mode = nullcontext) -> int:
    """Make the networks recompute their blocks in the backward pass; return the number of blocks.

    Networks with a gradient penalty are skipped, since they need their activations in a second backward pass. Blocks
    are recomputed in the context that `mode` returns: a torch function mode is not active during a backward pass.
    """
    count = 0
    for name in recipe.single_networks:
        if name.partition(".")[0] not in recipe.double_backward:
            for block in blocks_of(recipe, name):
                block.forward = _recomputed(block, block.forward, mode)
                count += 1
    return count


def _recomputed(block: nn.Module, forward: Callable[..., Any], mode: Mode) -> Callable[..., Any]:
    def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        return nullcontext(), _using(_copy_buffers(block), mode())

    def call(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return checkpoint(forward, *args, use_reentrant=False, context_fn=contexts, **kwargs)

    return call


def _copy_buffers(block: nn.Module) -> Buffers:
    """Return copies of a block's buffers, taken before its forward pass."""
    return [
        (module, name, buffer.clone())
        for module in block.modules()
        for name, buffer in module.named_buffers(recurse=False)
    ]


@contextmanager
def _using(copies: Buffers, mode: AbstractContextManager[object]) -> Iterator[None]:
    """Enter the mode and replace buffers with copies, so that recomputing a block changes only the copies."""
    originals = [(module, name, getattr(module, name)) for module, name, _ in copies]
    for module, name, copy in copies:
        setattr(module, name, copy)
    try:
        with mode:
            yield
    finally:
        for module, name, original in originals:
            setattr(module, name, original)
