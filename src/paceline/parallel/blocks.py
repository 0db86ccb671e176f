"""The blocks of a network: the repeated parts that can be sharded, or recomputed to save memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from paceline.contracts.recipe import Recipe, single_networks
from paceline.core.errors import UserError

CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


def blocks_of(recipe: Recipe, name: str) -> list[nn.Module]:
    """Return the blocks of one of the recipe's networks in definition order, without duplicates.

    `name` is a key of `single_networks`. The recipe can list the blocks. By default, they are the largest
    modules that occur several times in a container.
    """
    network = single_networks(recipe)[name]
    listed = recipe.blocks.get(name, recipe.blocks.get(name.partition(".")[0]))
    if listed is None:
        return list(dict.fromkeys(_repeated(network)))
    found = list(dict.fromkeys(_named(network, name, path) for path in listed))
    for outer in found:
        inside = {inner for inner in outer.modules() if inner is not outer}
        nested = next((path for path in listed if network.get_submodule(path) in inside), None)
        if nested is not None:
            raise UserError(f"blocks: {nested!r} of network {name!r} is inside another block: list only one of them")
    return found


def shares_parameters(block: nn.Module, network: nn.Module) -> bool:
    """Return whether a module outside a block has one of the block's parameters (tied weights or tied modules)."""
    own = set(block.parameters())
    return any(p in own for module in _modules_outside(network, block) for p in module.parameters(recurse=False))


def _modules_outside(module: nn.Module, block: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules that can be reached without the block; a module may also be inside the block."""
    if module is not block:
        yield module
        for child in module.children():
            yield from _modules_outside(child, block)


def _named(network: nn.Module, name: str, path: str) -> nn.Module:
    modules: dict[str, nn.Module] = dict(network.named_modules())
    if path not in modules or not path:
        raise UserError(f"blocks: network {name!r} has no module {path!r}: list names from its named_modules()")
    if isinstance(modules[path], (nn.ModuleList, nn.ModuleDict)):
        raise UserError(f"blocks: {path!r} of network {name!r} cannot be called: list the modules that it contains")
    return modules[path]


def _repeated(module: nn.Module) -> list[nn.Module]:
    """Return, in order, the largest modules whose class occurs more than once in a container."""
    inner = {child: _repeated(child) for child in module.children()}
    candidates = {child for child, blocks in inner.items() if _can_be_block(child, blocks)}
    # A module that the container holds several times counts that many times.
    kinds = Counter(type(child) for child in module._modules.values() if child in candidates)
    found: list[nn.Module] = []
    for child, blocks in inner.items():
        is_block = child in candidates and isinstance(module, CONTAINERS) and kinds[type(child)] > 1
        found += [child] if is_block else blocks
    return found


def _can_be_block(module: nn.Module, blocks: list[nn.Module]) -> bool:
    """Return whether a module has parameters and submodules, but is not a stage that only contains other blocks.

    A ResNet consists of such stages. A single layer is too small to be a block.
    """
    is_stage = isinstance(module, CONTAINERS) and bool(blocks)
    can_be_called = not isinstance(module, (nn.ModuleList, nn.ModuleDict))
    has_layers = any(True for _ in module.children()) and any(True for _ in module.parameters())
    return can_be_called and not is_stage and has_layers


Buffers = list[tuple[nn.Module, str, Tensor]]
Mode = Callable[[], AbstractContextManager[object]]


def recompute_blocks(recipe: Recipe, mode: Mode = nullcontext) -> int:
    """Make the networks recompute their blocks in the backward pass; return the number of blocks.

    Networks with a gradient penalty are skipped, since they need their activations in a second backward pass. Blocks
    are recomputed in the context that `mode` returns: a torch function mode is not active during a backward pass.
    """
    count = 0
    for name in single_networks(recipe):
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
