"""Show the progress of a run: a live bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack
from types import TracebackType
from typing import Self, TextIO, cast

from rich.console import Console, Group
from rich.file_proxy import FileProxy
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from paceline.core.printable import print_line, printable
from paceline.core.screen import open_screen
from paceline.runs.console import Tee, user_stream

_MAX_VALUES = 4  # losses shown on one line
_FRAME_SECONDS = 0.1  # minimum time between two frames, so that a fast loop does not redraw constantly
_OTHER_GROUPS = ("gpu", "host", "spread", "time")  # metric groups that are not losses


class Display:
    """Shows the progress of a run inside a `with` block; shows nothing if disabled."""

    def __init__(self, total_images: int, start_images: int, title: str, enabled: bool) -> None:
        self._total, self._images, self._title, self._enabled = total_images, start_images, printable(title), enabled
        self._clock = time.perf_counter()
        self._first: tuple[int, float] | None = None  # images and time at the first update, after warm-up
        self._next_frame = 0.0
        self._live: Live | None = None
        self._ending = ExitStack()

    def __enter__(self) -> Self:
        self._clock = time.perf_counter()
        if self._enabled and _is_terminal(sys.stdout):
            self._start_bar(open_screen(file=user_stream(sys.stdout)))
        elif self._enabled and self._title:
            print(self._title, flush=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ending.close()
        self._live = None

    def update(self, images: int, values: Mapping[str, float]) -> None:
        """Show the progress and the first few losses.

        `values` may contain `images_per_second` and `data_wait` (the fraction of time spent waiting for data), with any
        prefix. Without `images_per_second`, the rate since the last update is shown.
        """
        if not self._enabled:
            return
        now = time.perf_counter()
        named = {name.rpartition("/")[2]: value for name, value in values.items()}
        rate = named.get("images_per_second", (images - self._images) / max(now - self._clock, 1e-9))
        self._first = self._first or (images, now)
        eta = _duration(self._seconds_left(images, now, rate))
        self._images, self._clock = images, now
        shown = [*_losses(values), f"{rate:,.0f} img/s"]
        if "data_wait" in named:
            shown.append(f"data wait {named['data_wait']:.1%}")
        place = f"{images:>{len(f'{self._total:,}')},} / {self._total:,} images"
        share = f"{images / max(self._total, 1):4.0%}"
        if self._live is None:
            print_line("  ".join([f"  {place}", share.strip(), *shown, f"ETA {eta}"]))
            return
        due = now >= self._next_frame  # a skipped frame is replaced by the next one, or drawn at the end
        self._live.update(self._frame(images, f"{share}  ETA {eta}", "  ".join([place, *shown])), refresh=due)
        if due:
            self._next_frame = now + _FRAME_SECONDS

    def line(self, text: str) -> None:
        """Print a line, above the bar if there is one."""
        if self._enabled:
            print_line(text)

    def _seconds_left(self, images: int, now: float, rate: float) -> float:
        """Estimate the time left from the average rate since the first update, including evaluations and saves.

        At the first update, use `rate` instead.
        """
        assert self._first is not None
        first_images, first_clock = self._first
        if images > first_images:
            rate = (images - first_images) / max(now - first_clock, 1e-9)
        return max(self._total - images, 0) / rate if rate > 0 else float("inf")

    def _start_bar(self, console: Console) -> None:
        # No thread redraws the bar, because that would take time from the training loop.
        # Printed lines are redirected below, because the redirection in rich would bypass the log.
        self._live = Live(
            self._frame(self._images, "", ""),
            console=console,
            auto_refresh=False,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._ending.enter_context(self._live)  # shows the cursor again on exit
        for name in ("stdout", "stderr"):
            self._print_above(name, console)

    def _print_above(self, name: str, console: Console) -> None:
        """Redirect a stream so that it prints above the bar, if the stream is a terminal."""
        stream = getattr(sys, name)
        if not stream.isatty():
            return
        owner, attribute = (stream, "shown") if isinstance(stream, Tee) else (sys, name)
        proxy = FileProxy(console, user_stream(stream))
        self._ending.callback(setattr, owner, attribute, user_stream(stream))
        self._ending.callback(proxy.flush)  # prints a final line that has no newline
        setattr(owner, attribute, cast(TextIO, proxy))

    def _frame(self, images: int, right: str, below: str) -> Group:
        bar = ProgressBar(total=max(self._total, 1), completed=images)
        row = Table.grid(padding=(0, 1), expand=True)
        row.add_column(no_wrap=True)
        row.add_column(ratio=1)
        row.add_column(no_wrap=True)
        row.add_row(Text(self._title, style="bold"), bar, Text(right))
        return Group(row, Text(below, no_wrap=True, overflow="ellipsis"))


def _is_terminal(stream: TextIO) -> bool:
    return stream.isatty() and os.environ.get("TERM") not in ("dumb", "unknown")


def _losses(values: Mapping[str, float]) -> list[str]:
    names = [name for name in values if name.partition("/")[0] not in _OTHER_GROUPS]
    names = [name for name in names if name.rpartition("/")[2] not in ("images_per_second", "data_wait")]
    return [f"{name} {values[name]:.4g}" for name in names[:_MAX_VALUES]]


def _duration(seconds: float) -> str:
    """Format a duration as hours:minutes:seconds, or minutes:seconds below one hour."""
    if seconds > 1e8:  # several years: the rate is not known yet
        return "?"
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
