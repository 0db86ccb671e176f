"""A thread that runs calls in order, so that the training loop does not wait for a disk."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from queue import Queue

MAX_WAITING = 256  # calls; adding one more waits


class Background:
    """Runs calls in a thread. An error in a call is raised at the next `add` or `wait`; later calls still run.

    The thread starts with the first call, and does not keep the process alive.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._calls: Queue[Callable[[], None] | None] = Queue(MAX_WAITING)
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self.is_closed = False

    def add(self, call: Callable[[], None]) -> None:
        """Run a call after those that were added before it; wait if too many are waiting."""
        assert not self.is_closed, f"{self._name}: the thread has ended"
        self.check()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
        self._calls.put(call)

    @property
    def is_running(self) -> bool:
        """Whether the thread has started and not ended, so that calls may be waiting."""
        return self._thread is not None and not self.is_closed

    def wait(self) -> None:
        """Wait until every call that was added before has ended; raise the first error, if any."""
        if self.is_running:
            reached = threading.Event()
            self._calls.put(reached.set)
            reached.wait()
        self.check()

    def check(self) -> None:
        """Raise the first error in the thread, once."""
        if self._error:
            error, self._error = self._error, None
            raise error

    def close(self, seconds: float = math.inf) -> None:
        """End the thread after the waiting calls; wait for at most `seconds`. Errors are not raised."""
        if self.is_running:
            assert self._thread
            self.is_closed = True
            self._calls.put(None)
            self._thread.join(seconds if math.isfinite(seconds) else None)
        self.is_closed = True

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            try:
                call()
            except BaseException as error:
                self._error = self._error or error
            del call  # so that what the call holds is freed now, not with the next call
