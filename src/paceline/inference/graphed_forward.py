"""A forward pass as CUDA graphs, one per shape of its input.

For a small batch, launching kernels from Python takes longer than running them. A replay needs only one launch. Large
batches gain nothing and their graphs would hold memory, so they run eagerly, as do shapes that occur only a few times.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from paceline.contracts.pixel_format import PixelFormat
from paceline.core.errors import describe_error
from paceline.inference.forward import Values
from paceline.parallel.torch_internals import end_broken_capture

EAGER_CALLS = 3  # calls with a shape before it is captured
MOST_GRAPHS = 6
LARGEST_PX = 1 << 20  # pixels in a batch

Key = tuple[torch.Size, PixelFormat]
Forward = Callable[[Tensor, PixelFormat], Values]


class _Captured:
    """A captured graph with its input and output tensors."""

    def __init__(self, forward: Forward, batch: Tensor, stored: PixelFormat, pool: Any) -> None:
        self.batch, self.graph = batch.clone(), torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, pool, capture_error_mode="thread_local"):
            self.results = forward(self.batch, stored)

    def replay(self, batch: Tensor) -> Values:
        """Return copies of the results, since the next replay overwrites them."""
        self.batch.copy_(batch)
        self.graph.replay()
        by_name = {name: made.clone() for name, made in self.results.by_name.items()}
        return Values(by_name, self.results.finite.clone())


class GraphedForward:
    """Runs a forward pass eagerly, and captures it for shapes that occur often. Stays eager if a capture fails."""

    def __init__(self, forward: Forward, device: torch.device) -> None:
        self._forward, self._device = forward, device
        self._seen: Counter[Key] = Counter()
        self._graphs: OrderedDict[Key, _Captured] = OrderedDict()
        self._pool: Any = None
        self.note = ""  # why captures are off, to be printed

    def __call__(self, batch: Tensor, stored: PixelFormat) -> Values:
        key = (batch.shape, stored)
        if key in self._graphs:
            self._graphs.move_to_end(key)
            return self._graphs[key].replay(batch)
        self._seen[key] += 1
        small = batch.shape[0] * batch.shape[1] * batch.shape[2] <= LARGEST_PX
        if self.note or not small or self._seen[key] <= EAGER_CALLS or not self._capture(key, batch):
            return self._forward(batch, stored)
        return self._graphs[key].replay(batch)

    def _capture(self, key: Key, batch: Tensor) -> bool:
        """Capture the forward pass for a shape; return whether it worked."""
        if len(self._graphs) >= MOST_GRAPHS:
            self._graphs.popitem(last=False)
        stream = torch.cuda.current_stream()
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        try:
            self._graphs[key] = _Captured(self._forward, batch, key[1], self._pool)
        except RuntimeError as error:
            torch.cuda.set_stream(stream)  # an error at the end of a capture can leave its private stream current
            self.note = f"CUDA graphs: off, because a capture failed ({describe_error(error)})"
            self._graphs.clear()
            end_broken_capture(self._pool, self._device)
            return False
        return True
