"""A function of named tensors as CUDA graphs, one per shape of its inputs.

For a small batch, launching kernels from Python takes longer than running them. A replay needs only one launch. Large
batches gain nothing and their graphs would hold memory, so they run eagerly, as do shapes that occur only a few times.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from paceline.contracts.recipe import Batch
from paceline.core.errors import describe_error
from paceline.parallel.torch_internals import end_broken_capture, own_generator_state

EAGER_CALLS = 3  # calls with a shape before it is captured
LARGEST_PX = 1 << 20  # pixels of a batch; the kernels of larger ones take longer than their launches
MOST_GRAPHS = 6  # further shapes stay eager: to replace a graph takes longer than it saves

Function = Callable[[Batch], Batch]
Key = tuple[tuple[str, torch.Size, torch.dtype], ...]


class _Captured:
    """A captured graph with its input and output tensors."""

    def __init__(self, function: Function, inputs: Batch, pool: Any) -> None:
        self.inputs = {name: tensor.clone() for name, tensor in inputs.items()}
        self.graph = torch.cuda.CUDAGraph()
        # During the capture, other threads, such as the one that writes checkpoints, may use the device.
        with torch.cuda.graph(self.graph, pool, capture_error_mode="thread_local"):
            self.results = function(dict(self.inputs))

    def replay(self, inputs: Batch) -> Batch:
        """Return copies of the results, since the next replay overwrites them."""
        for name, static in self.inputs.items():
            static.copy_(inputs[name])
        self.graph.replay()
        return {name: made.clone() for name, made in self.results.items()}


class GraphedFunction:
    """Calls a function eagerly, and captures it for shapes that occur often. Stays eager if a capture fails.

    The tensors that the function uses besides its inputs, such as weights, must keep their addresses; call `clear` if
    they do not. The function must not depend on anything else that changes, such as random numbers or values that it
    reads on the host.
    """

    def __init__(self, function: Function, device: torch.device, min_free: float = 0.0) -> None:
        """Wrap a function; nothing is captured while less than the fraction `min_free` of the memory is free."""
        self._function, self._device, self._min_free = function, device, min_free
        self._seen: Counter[Key] = Counter()
        self._graphs: dict[Key, _Captured] = {}
        self._pool: Any = None
        self.note = ""  # why captures are off, to be printed

    def __call__(self, inputs: Batch, *, capture: bool = True) -> Batch:
        """Return the results; `capture` is False if the inputs are too large to gain from a graph."""
        key = _key_of(inputs)
        if key in self._graphs:
            return self._graphs[key].replay(inputs)
        self._seen[key] += 1
        if self.note or not capture or self._seen[key] <= EAGER_CALLS or not self._capture(key, inputs):
            return self._function(inputs)
        return self._graphs[key].replay(inputs)

    def clear(self) -> None:
        """Discard all graphs, because tensors that they use have moved."""
        self._graphs.clear()
        self._pool = None  # its memory is free only when no graph uses it

    def _capture(self, key: Key, inputs: Batch) -> bool:
        """Capture the function for a shape; return whether it worked."""
        if len(self._graphs) >= MOST_GRAPHS:
            return False
        if self._min_free:
            free, total = torch.cuda.mem_get_info(self._device)
            if free < self._min_free * total:
                return False
        stream = torch.cuda.current_stream()
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        with own_generator_state(self._device):  # the graphs of a training step keep the present state
            try:
                self._graphs[key] = _Captured(self._function, inputs, self._pool)
            except RuntimeError as error:
                torch.cuda.set_stream(stream)  # an error at the end of a capture can leave its private stream current
                self.note = f"CUDA graphs: off, because a capture failed ({_reason(error)})"
                end_broken_capture(self._pool, self._device)
                self.clear()
                return False
        return True


def _key_of(inputs: Mapping[str, Tensor]) -> Key:
    return tuple((name, tensor.shape, tensor.dtype) for name, tensor in inputs.items())


def _reason(error: BaseException) -> str:
    """Describe the original error, since ending a broken capture raises a second one; raise it if it was Ctrl-C."""
    while error.__context__ is not None:
        error = error.__context__
    if not isinstance(error, Exception):
        raise error from None
    return describe_error(error)
