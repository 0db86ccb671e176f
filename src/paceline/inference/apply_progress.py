"""The progress of `apply`: a bar on a terminal, otherwise lines 2 to 10 s apart (longer if a tile takes longer)."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from paceline.core.activity import end_activity, is_terminal
from paceline.core.printable import printable_lines
from paceline.core.screen import open_screen
from paceline.core.ticker import Patience

PIXELS_IN_FULL = 10**6  # smaller totals are printed in pixels, larger ones in megapixels


class ApplyProgress:
    """Counts the pixels processed, and prints lines above the progress bar."""

    def __init__(self, total: int, bar: Progress | None) -> None:
        self._total, self._done, self._earlier, self._bar, self._patience = total, 0, 0, bar, Patience()
        self._start, self._lock = time.monotonic(), threading.Lock()
        self._task = bar.add_task("applying", total=total, speed="") if bar else None

    def resume(self, pixels: int) -> None:
        """Count pixels that an earlier command has processed, which do not count for the speed."""
        with self._lock:
            self._earlier += pixels
            self._done += pixels
            self._show("")

    def advance(self, pixels: int) -> None:
        """Count this many more pixels as processed. May be called by several threads."""
        with self._lock:
            self._done += pixels
            seconds = max(time.monotonic() - self._start, 1e-9)
            self._show(f"{(self._done - self._earlier) / 1e6 / seconds:.3g} megapixels/s")

    def _show(self, speed: str) -> None:
        if self._bar and self._task is not None:
            self._bar.update(self._task, completed=self._done, speed=speed)
        elif self._patience.is_over():
            in_full = self._total < PIXELS_IN_FULL
            total = f"{self._total:,} pixels" if in_full else f"{self._total / 1e6:,.1f} megapixels"
            done = f"{self._done / max(self._total, 1):.0%} of {total}"
            self.line(f"{done}, {speed}" if speed else done)

    def complete(self) -> None:
        """Fill the bar at the end, even if some images could not be used."""
        self._done = self._total
        if self._bar and self._task is not None:
            self._bar.update(self._task, completed=self._done)

    def line(self, text: str) -> None:
        """Print a line above the bar."""
        if self._bar:
            self._bar.console.print(text, soft_wrap=True)
        else:
            print(printable_lines(text), flush=True)
            self._patience.note_output()


@contextmanager
def show_progress(total: int) -> Iterator[ApplyProgress]:
    """Show a progress bar that counts processed pixels while the context is active."""
    end_activity()
    if not is_terminal(sys.stdout):
        yield ApplyProgress(total, None)
        return
    texts = TextColumn("{task.description}"), TextColumn("{task.fields[speed]}")
    columns = (texts[0], BarColumn(), TaskProgressColumn(), TimeRemainingColumn(), texts[1])
    with Progress(*columns, console=open_screen()) as bar:
        yield ApplyProgress(total, bar)
