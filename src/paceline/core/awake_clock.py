"""A clock that stops while this process is suspended."""

from __future__ import annotations

import time


class AwakeClock:
    """Counts the seconds during which this process runs. It must be read at regular intervals.

    If more than `longest_interval` passes between two readings, the process was suspended: by SIGSTOP, on a laptop that
    slept, or on a paused virtual machine. Only `longest_interval` of this time is counted.
    """

    def __init__(self, longest_interval: float) -> None:
        self._longest_interval = longest_interval
        self._seconds, self._read_at = 0.0, time.monotonic()

    def read(self) -> float:
        """Return the seconds since the clock was created, excluding those in which the process was suspended."""
        now = time.monotonic()
        self._seconds += min(now - self._read_at, self._longest_interval)
        self._read_at = now
        return self._seconds
