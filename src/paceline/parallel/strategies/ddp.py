"""torch.nn.parallel.DistributedDataParallel: a process per device, gradients averaged during backward."""

from __future__ import annotations

import inspect
import warnings
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import nn

from paceline.parallel.strategy import NOTHING, Strategy
from paceline.recipe import Batch, Loss, Phase

# Buffers are broadcast once, when a wrapper is built: per forward it breaks two forwards before one backward.
_PARAMETERS = inspect.signature(nn.parallel.DistributedDataParallel.__init__).parameters
STILL_BUFFERS: dict[str, Any] = {
    ("forward_sync_buffers" if "forward_sync_buffers" in _PARAMETERS else "broadcast_buffers"): False
}

# Said of 1×1 convolutions, whose strides have two names for one layout.
warnings.filterwarnings("ignore", message="Grad strides do not match bucket view strides")


class DistributedDataParallel(Strategy):
    """One wrapper per phase around the recipe, built while only that phase's network requires grad."""

    distributed = True

    def prepare(self, phase: Phase) -> None:
        self.wrappers = getattr(self, "wrappers", {})
        self.wrappers[phase.name] = nn.parallel.DistributedDataParallel(
            self.call,
            gradient_as_bucket_view=True,
            bucket_cap_mb=5 if self.world.backend == "gloo" else 25,
            **STILL_BUFFERS,
        )

        self._settle(self.wrappers[phase.name])

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
