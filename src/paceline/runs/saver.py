"""Checkpoints are written by a thread: the loop only copies its state."""

from __future__ import annotations

import threading
from collections.abc import Callable
from time import perf_counter
from types import TracebackType

from paceline.runs.checkpoint import Checkpoints
from paceline.runs.snapshot import Snapshot

LAST_SECONDS = 2.0  # that a save may take after a second Ctrl-C


class Saver:
    """Writes one checkpoint at a time; an error in its thread is raised at the next call from the loop.

    Its `with` block ends when nothing is being written any more, also after an error.
    """

    def __init__(self, checkpoints: Checkpoints) -> None:
        self.checkpoints = checkpoints
        self.num_saves = 0
        self.seconds = 0.0  # that the thread took
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def save(
        self,
        snapshot: Snapshot,
        keep: int,
        best: int | None,
        *,
        before: Callable[[], None] = lambda: None,
        after: Callable[[], None] = lambda: None,
    ) -> None:
        """Start to write a snapshot that nobody changes any more; `before` and `after` are called in the thread."""
        self.wait()

        def write() -> None:
            began = perf_counter()
            try:
                before()
                self.checkpoints.save(snapshot)
                self.checkpoints.prune(keep, best)
                self.num_saves += 1
                after()
            except BaseException as error:
                self._error = error
            self.seconds += perf_counter() - began

        self._thread = threading.Thread(target=write, name="saver", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Return when the last checkpoint is written; raise the error where it could not be."""
        if self._thread:
            self._thread.join()
        self.check()

    def check(self) -> None:
        """Raise the error that the thread met, if any; costs nothing, so the loop calls it at every step."""
        if self._error:
            error, self._error = self._error, None
            raise error

    def __enter__(self) -> Saver:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.wait()
        elif self._thread:  # the first error is the one to report
            self._thread.join(LAST_SECONDS if issubclass(kind, KeyboardInterrupt) else None)
