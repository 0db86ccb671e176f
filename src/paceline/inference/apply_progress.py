"""The progress of `apply`: a bar on a terminal, otherwise a line every few seconds."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from paceline.core.printable import printable_lines
from paceline.core.screen import open_screen

SECONDS_BETWEEN_LINES = 10.0  # time between progress lines if the output is not a terminal
PIXELS_IN_FULL = 10**6  # smaller totals are printed in pixels, larger ones in megapixels


class ApplyProgress:
    """Counts the pixels processed, and prints lines above the progress bar."""

    def __init__(self, total: int, bar: Progress | None) -> None:
        self._total, self._done, self._bar, self._printed_at = total, 0, bar, time.monotonic()
        self._task = bar.add_task("applying", total=total) if bar else None

    def advance(self, pixels: int) -> None:
        """Count this many more pixels as processed."""
        self._done += pixels
        if self._bar and self._task is not None:
            self._bar.update(self._task, completed=self._done)
        elif time.monotonic() - self._printed_at > SECONDS_BETWEEN_LINES:
            in_full = self._total < PIXELS_IN_FULL
            total = f"{self._total:,} pixels" if in_full else f"{self._total / 1e6:,.1f} megapixels"
            self.line(f"{self._done / max(self._total, 1):.0%} of {total}")

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
            self._printed_at = time.monotonic()


@contextmanager
def show_progress(total: int) -> Iterator[ApplyProgress]:
    """Show a progress bar that counts processed pixels while the context is active."""
    if not sys.stdout.isatty():
        yield ApplyProgress(total, None)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=open_screen()) as bar:
        yield ApplyProgress(total, bar)
