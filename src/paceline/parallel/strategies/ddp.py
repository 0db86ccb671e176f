"""torch.nn.parallel.DistributedDataParallel: a process per device, gradients averaged during backward."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook

from paceline.contracts.recipe import Batch, Loss, Phase, Recipe
from paceline.parallel.ddp_options import STILL_BUFFERS
from paceline.parallel.strategy import NOTHING, Strategy

# Said of 1×1 convolutions, whose strides have two names for one layout.
warnings.filterwarnings("ignore", message="Grad strides do not match bucket view strides")


class DistributedDataParallel(Strategy):
    """One wrapper per phase around the recipe, built while only that phase's network requires grad."""

    needs_processes = True
    complexity = 1

    def place(self, recipe: Recipe) -> None:
        super().place(recipe)
        if self.settings.compress != "none":
            self.notes.append(f"gradients: sent in {self.settings.compress}, rounded; results differ a little")

    def prepare(self, phase: Phase) -> None:
        self.wrappers = getattr(self, "wrappers", {})
        with self._on_the_side():
            self.wrappers[phase.name] = nn.parallel.DistributedDataParallel(
                self.call,
                gradient_as_bucket_view=True,
                bucket_cap_mb=5 if self.world.backend == "gloo" else 25,
                **STILL_BUFFERS,
            )
            if self.settings.compress == "bf16":
                self.wrappers[phase.name].register_comm_hook(None, bf16_compress_hook)
            self._settle(self.wrappers[phase.name])

    @contextmanager
    def _on_the_side(self) -> Iterator[None]:
        """Inside, work goes to a stream of its own: a wrapper that was built on the default one cannot be captured."""
        if self.world.device.type != "cuda":
            yield
            return
        side, before = torch.cuda.Stream(self.world.device), torch.cuda.current_stream(self.world.device)
        side.wait_stream(before)
        with torch.cuda.stream(side):
            yield
        before.wait_stream(side)

    def _settle(self, wrapper: nn.parallel.DistributedDataParallel) -> None:
        """Has the wrapper's first backward behind it before training begins.

        After that one it orders its buckets anew, and with them sums over three ranks or more: without this, a
        resumed run would add its first gradients in another order than one that was not stopped.
        """
        for _ in range(2):
            wrapper(NOTHING, {}).terms[NOTHING].backward()
        wrapper.zero_grad(set_to_none=True)

    def forward(self, phase: Phase, batch: Batch) -> Loss:
        return self.wrappers[phase.name](phase.name, batch)

    def accumulating(self, phase: Phase, last: bool) -> AbstractContextManager:
        return nullcontext() if last else self.wrappers[phase.name].no_sync()
