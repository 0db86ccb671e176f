"""Write checkpoints in a thread, so that the training loop only has to copy its state."""

from __future__ import annotations

import threading
from collections.abc import Callable
from time import perf_counter
from types import TracebackType

from paceline.runs.checkpoint import Checkpoints
from paceline.runs.snapshot import Snapshot

LAST_SECONDS = 2.0  # maximum time to wait for a save after a second Ctrl-C


class Saver:
    """Writes one checkpoint at a time in a thread; an error in the thread is raised at the next call.

    The `with` block waits for a pending save before it exits, even after an error.
    """

    def __init__(self, checkpoints: Checkpoints) -> None:
        self.checkpoints = checkpoints
        self.num_saves = 0
        self.seconds = 0.0  # total time spent in the thread
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
        """Start writing a snapshot, which must no longer change; `before` and `after` are called in the thread."""
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
        """Wait until the last checkpoint is written; re-raise any error from writing it."""
        if self._thread:
            self._thread.join()
        self.check()

    def check(self) -> None:
        """Raise the thread's error, if any; cheap enough to call at every step."""
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
        elif self._thread:  # an error from the save must not hide the first error
            self._thread.join(LAST_SECONDS if issubclass(kind, KeyboardInterrupt) else None)
