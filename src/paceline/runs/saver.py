"""Write checkpoints in a thread, so that the training loop only has to start copying its state."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from time import perf_counter
from types import TracebackType

from paceline.core.watch import beat
from paceline.runs.background import Background
from paceline.runs.checkpoint import Checkpoints, Snapshot, Writers, help_write, joint_writer, write_alone

LAST_SECONDS = 2.0  # maximum time to wait for a save after a second Ctrl-C


class Saver(Background):
    """Writes one checkpoint at a time in a thread; an error in the thread is raised at the next call.

    The `with` block waits for a pending save before it exits, even after an error.
    """

    def __init__(self, checkpoints: Checkpoints, writers: Writers | None = None) -> None:
        """Create a saver. `writers` are the processes that write each checkpoint together, if there are several."""
        super().__init__("saver")
        self.checkpoints, self.writers = checkpoints, writers
        self.num_saves = 0
        self.saved_at = -1  # images seen at the last checkpoint that this process has completed
        self.seconds = 0.0  # total time spent in the thread

    def save(
        self,
        snapshot: Callable[[], Snapshot],
        keep: int,
        best: int | None,
        *,
        before: Callable[[], None] = lambda: None,
        after: Callable[[], None] = lambda: None,
    ) -> None:
        """Start writing a snapshot, which must no longer change; all functions are called in the thread."""
        self.wait()

        def write() -> None:
            began = perf_counter()
            try:
                taken = snapshot()
                if self._write(taken, before):
                    self.saved_at = taken.images
                    beat()
                    self.checkpoints.prune(keep, best)
                    self.num_saves += 1
                    after()
            finally:
                self.seconds += perf_counter() - began

        self.add(write)

    def _write(self, snapshot: Snapshot, before: Callable[[], None]) -> bool:
        """Write a checkpoint, or this process's part of it; return whether this process completes checkpoints."""
        if self.writers and self.writers.rank > 0:
            help_write(snapshot, self.writers)
            return False
        with joint_writer(self.writers) if self.writers else nullcontext(write_alone) as write:
            before()
            self.checkpoints.save(snapshot, write)
        return True

    def describe_cost(self, in_loop: float) -> str:
        """Return a line about the seconds spent on checkpoints, in the training loop and in the thread."""
        checkpoints = "1 checkpoint" if self.num_saves == 1 else f"{self.num_saves} checkpoints"
        return f"saved {checkpoints}: {in_loop:.2f} s in the loop, {self.seconds:.2f} s in the background"

    def __enter__(self) -> Saver:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:  # an error from the save must not hide the first error
                self.wait()
        finally:
            self.close(LAST_SECONDS if kind and issubclass(kind, KeyboardInterrupt) else math.inf)
