"""Repeated work in the background, and the times at which progress is printed if the output is not a terminal."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress

FIRST_SECONDS, MAX_SECONDS = 2.0, 10.0  # time until the first progress line, and the longest time between two lines


class Ticker(threading.Thread):
    """A daemon thread that calls a function at a fixed interval until it is stopped."""

    def __init__(self, seconds: float, call: Callable[[], None]) -> None:
        super().__init__(name="ticker", daemon=True)
        self._seconds, self._call, self._ended = seconds, call, threading.Event()
        self.start()

    def run(self) -> None:
        while not self._ended.wait(self._seconds):
            with suppress(OSError, ValueError):  # the terminal or the pipe is closed
                self._call()

    def stop(self) -> None:
        """Make no further calls; a call that is in progress is not interrupted."""
        self._ended.set()


class Patience:
    """Decides when a progress line is due: after two seconds without output, then less often, up to every 10 seconds.

    Short activities therefore print nothing, and long activities do not flood a log file.
    """

    def __init__(self) -> None:
        self._seconds, self._printed_at = FIRST_SECONDS, time.monotonic()

    def is_over(self) -> bool:
        """Return whether a line is due; if it is, the caller prints it and the next line is due later."""
        now = time.monotonic()
        if now - self._printed_at < self._seconds:
            return False
        self._seconds, self._printed_at = min(2 * self._seconds, MAX_SECONDS), now
        return True

    def note_output(self) -> None:
        """Start waiting anew, because another line was printed."""
        self._printed_at = time.monotonic()
