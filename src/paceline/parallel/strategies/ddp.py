"""torch.nn.parallel.DistributedDataParallel: one process per device; gradients are averaged in the backward pass."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook

from paceline.config.settings import RunSettings
from paceline.contracts.recipe import Batch, Loss, Phase, Recipe
from paceline.parallel.precision import Precision
from paceline.parallel.strategy import NO_BUFFER_BROADCAST, NOTHING, MemoryShares, Strategy, bytes_of, check_gradients
from paceline.parallel.world import World


class DistributedDataParallel(Strategy):
    """Wraps the recipe once per phase, while only that phase's network requires grad."""

    needs_processes = True
    complexity = 1

    def __init__(self, settings: RunSettings, world: World, precision: Precision, recipe: Recipe) -> None:
        super().__init__(settings, world, precision, recipe)
        if settings.compress != "none":
            self.notes.append(f"gradients: rounded to {settings.compress} for communication; results differ slightly")
        self.wrappers = {phase.name: self._wrap(phase) for phase in recipe.phases}
        self.trainable.release()

    @classmethod
    def memory_shares(cls, recipe: Recipe, num_devices: int) -> MemoryShares:
        # Each phase has its own buckets. Gradients are views of them.
        sizes = (
            bytes_of(p for p in recipe.networks[phase.network].parameters() if p.requires_grad)
            for phase in recipe.phases
        )
        return MemoryShares(gradient_copies=0, buffer_bytes=sum(sizes))

    def _wrap(self, phase: Phase) -> nn.parallel.DistributedDataParallel:
        self.trainable.select(phase.network)
        with self._side_stream():
            wrapper = nn.parallel.DistributedDataParallel(
                self.call,
                gradient_as_bucket_view=True,
                bucket_cap_mb=5 if self.world.backend == "gloo" else 25,
                **NO_BUFFER_BROADCAST,
            )
            if self.settings.compress == "bf16":
                wrapper.register_comm_hook(None, bf16_compress_hook)
            self._run_first_backward(wrapper)
        return wrapper

    @contextmanager
    def _side_stream(self) -> Iterator[None]:
        """Use a side stream inside the context: CUDA graphs cannot capture wrappers built on the default stream.

        Eager steps run on other streams. torch synchronises them, and need not warn about it.
        """
        if self.world.device.type != "cuda":
            yield
            return
        torch.autograd.graph.set_warn_on_accumulate_grad_stream_mismatch(False)
        side, before = torch.cuda.Stream(self.world.device), torch.cuda.current_stream(self.world.device)
        side.wait_stream(before)
        with torch.cuda.stream(side):
            yield
        before.wait_stream(side)

    def _run_first_backward(self, wrapper: nn.parallel.DistributedDataParallel) -> None:
        """Run the wrapper's first backward pass before training starts.

        DDP rebuilds its buckets after the first backward pass. On three or more ranks, this changes the order in which
        gradients are summed. Without this extra pass, a resumed run would sum its first gradients in a different order
        from an uninterrupted run.
        """
        for _ in range(2):
            wrapper(NOTHING, {}).terms[NOTHING].backward()
        wrapper.zero_grad(set_to_none=True)

    def forward(self, phase: Phase, batch: Batch) -> Loss:
        wrapper = self.wrappers[phase.name]
        check_gradients(wrapper, phase, self.settings, self.world.rank)
        loss: Loss = wrapper(phase.name, batch)
        return loss

    def accumulating(self, phase: Phase, last: bool) -> AbstractContextManager[object]:
        return nullcontext() if last else self.wrappers[phase.name].no_sync()
