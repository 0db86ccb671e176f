"""The time that a backward pass on the CPU waits for other processes after its own gradients are complete."""

from __future__ import annotations

from collections.abc import Iterable
from time import perf_counter

from torch import Tensor
from torch.utils.hooks import RemovableHandle

from paceline.parallel.exchange import waiting


class GradientWait:
    """Adds the wait at the end of a network's backward passes to `exchange.waiting`.

    DistributedDataParallel exchanges gradients in C++ and waits for them at the end of the backward pass. A hook on the
    last parameter records when the last of this process's own gradients is complete.
    """

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self._ready_at = 0.0
        self._last = -1
        self._handles: list[RemovableHandle] = [
            parameter.register_post_accumulate_grad_hook(self._hook(number))
            for number, parameter in enumerate(parameters)
        ]

    def _hook(self, number: int):  # type: ignore[no-untyped-def]  # a hook gets the parameter
        def note(parameter: Tensor) -> None:
            self._ready_at, self._last = perf_counter(), number

        return note

    def end_backward(self) -> None:
        """Add the time since the last gradient was complete; call this at the end of a backward pass."""
        if not self._ready_at:
            return
        waiting.seconds += perf_counter() - self._ready_at
        self._ready_at = 0.0
        if len(self._handles) > 1:  # gradients are computed in the same order in every step
            for number, handle in enumerate(self._handles):
                if number != self._last:
                    handle.remove()
            self._handles = [self._handles[self._last]]
