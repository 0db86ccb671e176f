"""A request to stop: the step is finished, the run is saved, and the same command goes on later."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import torch

from paceline.parallel.world import World

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
AGAIN_AFTER_SECONDS = 1.0  # a launcher passes the terminal's Ctrl-C on: the same request, not a second one
SECONDS_BETWEEN_LOOKS = 2.0

# Exit codes of a run that was asked to stop and saved itself.
INTERRUPTED = 130  # by Ctrl-C, as shells have it
GO_ON_LATER = 75  # by another signal (EX_TEMPFAIL)


class StopRequest:
    """Set by Ctrl-C, SIGTERM or SIGUSR1; a second Ctrl-C stops at once."""

    def __init__(self) -> None:
        self.signal: int = 0
        self._since = 0.0

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Inside, the signals are taken over; only a process's main thread can do that, elsewhere nothing is."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self._note) for number in SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    @property
    def exit_code(self) -> int:
        """Of a run that stopped for this; the request may have come to another rank alone."""
        return INTERRUPTED if self.signal == signal.SIGINT else GO_ON_LATER

    def _note(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self.signal and time.monotonic() - self._since > AGAIN_AFTER_SECONDS:
            raise KeyboardInterrupt
        if not self.signal:
            self.signal, self._since = number, time.monotonic()


class StopVote:
    """Whether any rank was asked to stop. Ranks look together, some seconds apart, so that it costs no step."""

    def __init__(self, world: World, request: StopRequest) -> None:
        self.world, self.request = world, request
        self._steps, self._look_after, self._since = 0, 1, time.monotonic()

    def __call__(self) -> bool:
        """Asked by every rank after every step; the same answer on each."""
        if self.world.size == 1:
            return bool(self.request.signal)
        self._steps += 1
        if self._steps < self._look_after:
            return False
        now = time.monotonic()
        own = torch.tensor([bool(self.request.signal), now - self._since], dtype=torch.float64)
        asked, seconds = self.world.gather(own.to(self.world.device)).cpu().unbind(1)
        fitting = int(SECONDS_BETWEEN_LOOKS * self._steps / max(seconds.max().item(), 1e-3))
        self._look_after = max(1, min(2 * self._look_after, fitting))
        self._steps, self._since = 0, now
        return bool(asked.any())
