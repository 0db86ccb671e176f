"""Fully sharded data parallelism (torch's `fully_shard`): each process holds a part of every network.

Weights, gradients, optimizer state and EMA are divided among the processes. A block's weights are gathered before the
block runs and released afterwards.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from paceline.config.settings import RunSettings
from paceline.contracts.recipe import Batch, Loss, Phase, Recipe, single_networks
from paceline.core.errors import UserError
from paceline.parallel.precision import Precision
from paceline.parallel.shards import (
    RejectPenalty,
    StagedAllGather,
    StagedReduceScatter,
    blocks_of,
    is_sharded,
    shares_parameters,
)
from paceline.parallel.strategy import Feature, MemoryShares, Strategy, Trainable, bytes_of
from paceline.parallel.world import World

# Copies of the largest block in a backward pass: its weights, those of the next block, its gradients, and the gradients
# that are being summed. A network without blocks has no next block. The numbers are estimates.
COPIES_OF_BLOCK, COPIES_OF_NETWORK = 4, 3


class FullyShardedDataParallel(Strategy):
    """Shards each network separately, block by block. A network with a gradient penalty stays replicated."""

    needs_processes = True
    shards_weights = True
    complexity = 4

    @classmethod
    def why_not(cls, feature: Feature) -> str:
        return {
            "capture": "FSDP allocates and releases weights in every step, so they have no fixed address",
            "compile": "FSDP gathers the weights in hooks, which torch.compile does not support for every network",
            "breakdown": "FSDP's communication cannot be separated from the step; measure ddp instead",
        }.get(feature, "")

    def __init__(self, settings: RunSettings, world: World, precision: Precision, recipe: Recipe) -> None:
        super().__init__(settings, world, precision, recipe)
        self.replicated = frozenset(recipe.double_backward)
        self.sharded: dict[str, list[FSDPModule]] = {}  # for each network: its blocks, then the network itself
        self._unchecked: set[str] = set()  # phases that may contain a gradient penalty that the recipe does not declare
        if world.size == 1:
            recipe.to(world.device)
            self.notes.append("fsdp: there is only one process, so no network is sharded")
            return
        self._check(recipe)
        self._unchecked |= {phase.name for phase in recipe.phases if phase.network not in self.replicated}
        mesh = init_device_mesh(world.device.type, (world.size,))
        for name, network in single_networks(recipe).items():
            if name.partition(".")[0] not in self.replicated:
                self.sharded[name] = self._shard(network, blocks_of(recipe, name), mesh)
        _move_rest(recipe, world.device)
        self.trainable = Trainable(recipe)  # sharding has replaced the parameters
        self.notes += self._describe()

    @classmethod
    def memory_shares(cls, recipe: Recipe, num_devices: int) -> MemoryShares:
        if num_devices == 1:
            return MemoryShares()
        held, gathered = {}, 0
        for name, network in recipe.networks.items():
            if name not in recipe.double_backward:
                whole = bytes_of(network.parameters())
                held[name] = sum(_bytes_of_rows(p, num_devices) for p in network.parameters()) / whole
        for name, network in single_networks(recipe).items():
            if name.partition(".")[0] not in recipe.double_backward:
                blocks = [bytes_of(block.parameters()) for block in blocks_of(recipe, name) if block is not network]
                rest = bytes_of(network.parameters()) - sum(blocks)
                in_blocks = rest + COPIES_OF_BLOCK * max(blocks) if blocks else 0
                gathered = max(gathered, in_blocks, COPIES_OF_NETWORK * rest)
        return MemoryShares(held, buffer_bytes=gathered)

    def _check(self, recipe: Recipe) -> None:
        if not recipe.networks.keys() - self.replicated:
            raise UserError(
                "--strategy fsdp: there is nothing to shard, since every network needs double backward; use ddp"
            )
        networks: dict[nn.Parameter, str] = {}  # the network of each parameter
        for network, module in single_networks(recipe).items():
            for name, parameter in module.named_parameters(network):
                if networks.setdefault(parameter, network) != network:
                    raise UserError(
                        f"--strategy fsdp: parameter {name!r} is also part of network {networks[parameter]!r}, but "
                        "FSDP shards each network separately; use ddp"
                    )
                if not parameter.ndim or not parameter.numel():
                    what = "has no elements, so it" if parameter.ndim else "is a scalar, which"
                    if network.partition(".")[0] not in self.replicated:
                        raise UserError(f"--strategy fsdp: parameter {name!r} {what} cannot be sharded; use ddp")

    def _shard(self, network: nn.Module, blocks: list[nn.Module], mesh: DeviceMesh) -> list[FSDPModule]:
        reduce = torch.bfloat16 if self.settings.compress == "bf16" else None
        policy = MixedPrecisionPolicy(reduce_dtype=reduce)  # autocast selects the precision of each operation
        modules = [
            fully_shard(module, mesh=mesh, reshard_after_forward=True, mp_policy=policy)
            for module in (*(block for block in blocks if not shares_parameters(block, network)), network)
        ]
        # By default, FSDP derives what to prefetch from all forward passes since the last backward pass. These differ
        # between the processes after an evaluation. An explicit order is the same in every process.
        for before, module in zip([modules[0], *modules], modules, strict=False):
            module.set_modules_to_backward_prefetch([before])
        if self.world.device.type == "cuda" and self.world.backend == "gloo":
            for module in modules:
                module.set_custom_all_gather(StagedAllGather())  # type: ignore[arg-type]
                module.set_custom_reduce_scatter(StagedReduceScatter())  # type: ignore[arg-type]
        return modules

    def _describe(self) -> list[str]:
        blocks = sum(len(modules) - 1 for modules in self.sharded.values())
        count = "1 network" if len(self.sharded) == 1 else f"{len(self.sharded)} networks"
        lines = [f"fsdp: {count} in {blocks + len(self.sharded)} parts, divided among {self.world.size} processes"]
        if self.settings.compress != "none":
            lines.append(f"gradients: rounded to {self.settings.compress} for communication; results differ slightly")
        if self.replicated:
            names = ", ".join(sorted(self.replicated))
            lines.append(f"fsdp: not sharded, because FSDP does not support double backward: {names}")
        return lines

    def forward(self, phase: Phase, batch: Batch) -> Loss:
        with _explaining_use_of_weights(f"phase {phase.name!r}"), self._checking(phase):
            return super().forward(phase, batch)

    def backward(self, loss: Tensor, last: bool) -> None:
        with _explaining_use_of_weights("a loss"):
            super().backward(loss, last)

    def _checking(self, phase: Phase) -> AbstractContextManager[object]:
        """Return a context for a phase's forward pass, which rejects a gradient penalty in the first one."""
        if phase.name not in self._unchecked:
            return nullcontext()
        self._unchecked.discard(phase.name)
        return RejectPenalty(
            f"--strategy fsdp: phase {phase.name!r} computes gradients with create_graph=True, which FSDP does not "
            f"support; add {phase.network!r} to the recipe's double_backward, so that it is not sharded, or use ddp"
        )

    def accumulating(self, phase: Phase, last: bool) -> AbstractContextManager[object]:
        if self.world.size == 1 or phase.network not in self.replicated or not last:
            return nullcontext()  # FSDP adds up the gradients of micro-batches in their sharded form
        return self._averaging(phase.network)

    @contextmanager
    def _averaging(self, network: str) -> Iterator[None]:
        """Average the gradients of a replicated network across the processes after its backward pass."""
        yield
        gradients = [p.grad for p in self.trainable.parameters[network] if p.grad is not None]
        if not gradients:
            return
        flat = self.world.sum(torch.cat([gradient.flatten() for gradient in gradients])) / self.world.size
        for gradient, part in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
            gradient.copy_(part.view_as(gradient))

    @contextmanager
    def whole_weights(self) -> Iterator[None]:
        modules = [module for modules in self.sharded.values() for module in modules]
        for module in modules:
            module.set_reshard_after_forward(False, recurse=False)
            module.unshard()
        try:
            yield
        finally:
            for module in modules:
                module.reshard()
                module.set_reshard_after_forward(True, recurse=False)


@contextmanager
def _explaining_use_of_weights(user: str) -> Iterator[None]:
    """Raise UserError if a divided weight is combined with a whole tensor."""
    try:
        yield
    except RuntimeError as error:
        if DTensor.__name__ not in str(error):
            raise
        raise UserError(
            f"--strategy fsdp: {user} uses a network's weights while they are divided among the processes; call the "
            "network itself, self.NETWORK(...), not its methods, layers or weights; or use ddp"
        ) from error


def _move_rest(recipe: Recipe, device: torch.device) -> None:
    """Move the parameters that are not sharded and all buffers to the device."""
    for parameter in recipe.parameters():
        if not is_sharded(parameter):
            parameter.data = parameter.data.to(device)
    for module in recipe.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(device))


def _bytes_of_rows(tensor: Tensor, num_devices: int) -> int:
    """Return the size of the first device's rows of a tensor."""
    return tensor.nbytes // len(tensor) * -(-len(tensor) // num_devices)
