"""Parts of networks: blocks that are sharded or recomputed, and tensors whose rows are divided among the processes.

Rows are those of torch's DTensor, for FSDP. Blocks are the repeated parts of a network.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from paceline.contracts.recipe import Recipe, single_networks
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
