"""The time that a backward pass on the CPU waits for other processes after its own gradients are complete."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from time import perf_counter

from torch import Tensor
from torch.utils.hooks import RemovableHandle

from paceline.parallel.exchange import waiting


class GradientWait:
    """Adds the wait at the end of a network's backward passes to `exchange.waiting`.

    DistributedDataParallel exchanges gradients in C++ and waits for them at the end of the backward pass. Hooks on the
    parameters record when the last of this process's own gradients is complete. In every step, a phase computes its
    gradients in the same order. So once each phase has run, only the last parameter of each phase keeps its hook.
    """

    def __init__(self, parameters: Iterable[Tensor], phases: Iterable[str]) -> None:
        """Observe a network's parameters; `phases` are the names of the phases that train the network."""
        self._ready_at, self._last = 0.0, -1  # when the last gradient was complete, and the number of its parameter
        self._last_of: dict[str, int] = {}  # by phase
        self._unseen = set(phases)
        self._handles: dict[int, RemovableHandle] = {
            number: parameter.register_post_accumulate_grad_hook(self._hook(number))
            for number, parameter in enumerate(parameters)
        }

    def _hook(self, number: int) -> Callable[[Tensor], None]:
        def note(parameter: Tensor) -> None:
            self._ready_at, self._last = perf_counter(), number

        return note

    def end_backward(self, phase: str) -> None:
        """Add the time since the last gradient was complete; call this at the end of a phase's backward pass."""
        if not self._ready_at:
            return
        waiting.seconds += perf_counter() - self._ready_at
        self._ready_at = 0.0
        if phase in self._unseen:
            self._unseen.discard(phase)
            self._last_of[phase] = self._last
            if not self._unseen:
                self._keep(set(self._last_of.values()))

    def _keep(self, numbers: set[int]) -> None:
        """Remove the hooks of all other parameters, because they cost time in every step."""
        for number in self._handles.keys() - numbers:
            self._handles.pop(number).remove()
