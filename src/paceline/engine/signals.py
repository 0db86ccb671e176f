"""A request to stop: the step is finished, the run is saved, and the same command goes on later."""

from __future__ import annotations

import signal
import time
from types import FrameType

AGAIN_AFTER_SECONDS = 1.0  # a launcher passes the terminal's Ctrl-C on: the same request, not a second one


class StopRequest:
    """Set by Ctrl-C, SIGTERM or SIGUSR1; a second Ctrl-C stops at once."""

    def __init__(self) -> None:
        self.signal: int = 0
        self._since = 0.0

    def listen(self) -> None:
        """Takes over the signals; only the main thread can."""
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self.signal and time.monotonic() - self._since > AGAIN_AFTER_SECONDS:
            raise KeyboardInterrupt
        if not self.signal:
            self.signal, self._since = number, time.monotonic()
