"""A function of named tensors as CUDA graphs, one per shape of its inputs.

For a small batch, launching kernels from Python takes longer than running them. A replay needs only one launch. Large
batches gain nothing and their graphs would hold memory, so they run eagerly, as do shapes that occur only a few times.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import torch

from paceline.contracts.recipe import Batch
from paceline.core.errors import describe_error
from paceline.parallel.torch_internals import copy_all, end_broken_capture, own_generator_state

EAGER_CALLS = 3  # calls with a shape before it is captured
LARGEST_PX = 1 << 20  # pixels of a batch; the kernels of larger ones take longer than their launches
MOST_GRAPHS = 6  # further shapes stay eager: to replace a graph takes longer than it saves

Function = Callable[[Batch], Batch]
Results = TypeVar("Results")
Key = tuple[tuple[str, torch.Size, torch.dtype], ...]


class CapturedGraph(Generic[Results]):
    """A captured CUDA graph of a function of batches, with its input and output tensors."""

    def __init__(self, function: Callable[[list[Batch]], Results], batches: Sequence[Batch], pool: Any) -> None:
        self.inputs = [{name: tensor.clone() for name, tensor in batch.items()} for batch in batches]
        self.graph = torch.cuda.CUDAGraph()
        # During the capture, other threads may use the device: a watchdog, a loader, or the writer of checkpoints.
        with torch.cuda.graph(self.graph, pool, capture_error_mode="thread_local"):
            self.results = function(self.inputs)

    def replay(self, batches: Sequence[Batch]) -> Results:
        """Run the captured kernels on new data; the next replay overwrites the results."""
        for inputs, batch in zip(self.inputs, batches, strict=True):
            copy_all(list(inputs.values()), [batch[name] for name in inputs])
        self.graph.replay()
        return self.results


def end_failed_capture(error: BaseException, stream: torch.cuda.Stream, pool: Any, device: torch.device) -> Exception:
    """Let the process continue after a failed capture, on the stream that was current before; return the cause."""
    torch.cuda.set_stream(stream)  # an error at the end of a capture can leave its private stream current
    cause = root_cause(error)
    if not isinstance(cause, Exception):
        raise cause from None  # Ctrl-C during the capture
    end_broken_capture(pool, device)
    return cause


def root_cause(error: BaseException) -> BaseException:
    """Return the original error, since ending a broken capture raises a second one."""
    while error.__context__ is not None:
        error = error.__context__
    return error


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
        self._graphs: dict[Key, CapturedGraph[Batch]] = {}
        self._pool: Any = None
        self.note = ""  # why captures are off, to be printed

    def __call__(self, inputs: Batch, *, capture: bool = True) -> Batch:
        """Return the results; `capture` is False if the inputs are too large to gain from a graph."""
        key = tuple((name, tensor.shape, tensor.dtype) for name, tensor in inputs.items())
        if key in self._graphs:
            return self._replay(key, inputs)
        self._seen[key] += 1
        if self.note or not capture or self._seen[key] <= EAGER_CALLS or not self._capture(key, inputs):
            return self._function(inputs)
        return self._replay(key, inputs)

    def _replay(self, key: Key, inputs: Batch) -> Batch:
        """Return copies of the results, since the next replay overwrites them."""
        return {name: result.clone() for name, result in self._graphs[key].replay([inputs]).items()}

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
                self._graphs[key] = CapturedGraph(
                    lambda batches: self._function(dict(batches[0])), [inputs], self._pool
                )
            except RuntimeError as error:
                cause = end_failed_capture(error, stream, self._pool, self._device)
                self.note = f"CUDA graphs: off, because a capture failed ({describe_error(cause)})"
                self.clear()
                return False
        return True
