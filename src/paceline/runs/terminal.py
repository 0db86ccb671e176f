"""A run on the terminal: its progress, and the output of each rank, which is also kept in logs/."""

from __future__ import annotations

import atexit
import os
import re
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TextIO, cast

from rich.console import Console, Group
from rich.file_proxy import FileProxy
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from paceline.core.files import open_append
from paceline.core.terminal import MAX_SECONDS, Patience, Ticker, end_activity, is_terminal, open_screen
from paceline.core.text import duration, epoch, four_digits, print_line, printable, rate, wrapped
from paceline.core.watch import dump_stacks_on_signal, stop_dumping_stacks

LOGS = "logs"  # folder within a run folder
_CONTROL_CODES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])")


def log_output(folder: Path, rank: int) -> ExitStack:
    """Log this process's output to logs/rank-N.txt until the returned stack is closed.

    After an error, the stack stays open until the process exits, so that the traceback is logged too.
    """
    path = folder / LOGS / f"rank-{rank}.txt"
    path.parent.mkdir(parents=True, exist_ok=True)
    ending = ExitStack()
    if rank == 0:
        _print_and_log(path, ending)
    else:
        _only_log(path, ending)
    dump_stacks_on_signal(path)
    ending.callback(stop_dumping_stacks)
    atexit.register(ending.close)
    ending.callback(atexit.unregister, ending.close)
    return ending


def user_stream(stream: TextIO) -> TextIO:
    """Return the stream that the user sees; text written to it is not logged."""
    return stream.stream if isinstance(stream, Tee) else stream


class Tee:
    """A text stream that is printed unchanged and logged as plain lines.

    All other attributes (isatty, fileno, encoding) come from the underlying stream.
    """

    def __init__(self, stream: TextIO, log: TextIO, lock: threading.RLock) -> None:
        self.stream = stream
        self.shown = stream  # `Display` replaces it with a stream that prints above the progress bar
        self._log, self._lock, self._unfinished = log, lock, ""

    def write(self, text: str) -> int:
        self.shown.write(text)
        self._record(text)
        return len(text)

    def write_line(self, line: str) -> None:
        """Print a line, broken between words on a terminal, and log it without these breaks."""
        self.shown.write(f"{wrapped(line, self.stream)}\n")
        self._record(f"{line}\n")

    def _record(self, text: str) -> None:
        with self._lock:
            lines, newline, self._unfinished = (self._unfinished + text).rpartition("\n")
            if newline:
                with suppress(OSError):  # a full disk is reported when a checkpoint is saved
                    self._log.write("".join(f"{_plain(line)}\n" for line in lines.split("\n")))
            # Drop progress bar frames that have already been overwritten.
            self._unfinished = self._unfinished[self._unfinished.rstrip("\r").rfind("\r") + 1 :]

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        self.shown.flush()

    def finish(self) -> None:
        """Log a final line that does not end in a newline."""
        with self._lock:
            if self._unfinished:
                self._log.write(f"{_plain(self._unfinished)}\n")
            self._unfinished = ""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


def _plain(line: str) -> str:
    """Return a line as a terminal would show it, without control codes or overwritten text."""
    return _CONTROL_CODES.sub("", line).rstrip("\r").rpartition("\r")[2]


def _print_and_log(path: Path, ending: ExitStack) -> None:
    log = os.fdopen(open_append(path), "a", buffering=1, encoding="utf-8", errors="backslashreplace")
    ending.callback(log.close)
    lock = threading.RLock()
    for name in ("stdout", "stderr"):
        shown = getattr(sys, name)
        tee = Tee(shown, log, lock)
        setattr(sys, name, cast(TextIO, tee))
        ending.callback(tee.finish)
        ending.callback(setattr, sys, name, shown)


def _only_log(path: Path, ending: ExitStack) -> None:
    """Redirect the process's file descriptors to the file, so that output from C libraries is logged too."""
    log = open_append(path)
    for stream, number in ((sys.stdout, 1), (sys.stderr, 2)):
        stream.flush()
        before = os.dup(number)
        os.dup2(log, number)
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(line_buffering=True)  # so that no printed line is lost if the process is killed
        ending.callback(os.close, before)
        ending.callback(os.dup2, before, number)
        ending.callback(stream.flush)
    os.close(log)


_TICK_SECONDS = 0.5  # time between two checks of whether the loop has reported
_FRAME_SECONDS = 0.1  # minimum time between two frames, so that a fast loop does not redraw constantly
# Without a terminal, the minimum time between two lines with losses is a share of the time so far, within limits.
_LINE_SHARE, _MIN_LINE_SECONDS, _MAX_LINE_SECONDS = 0.01, 1.0, MAX_SECONDS
_STILL_SECONDS = 1.5  # time without a report from the loop after which the waiting time is shown
_OTHER_GROUPS = ("gpu", "host", "ranks", "spread", "time")  # metric groups that are not losses
FIRST_STEP, CURRENT_STEP = "first step", "current step"  # what the loop does unless it reports something else
_NOT_LOSSES = ("images_per_second", "data_wait", "epoch")


class Display:
    """Shows the progress of a run inside a `with` block; shows nothing if disabled.

    If `epoch_images` is given, the progress is also shown in epochs of this many images.
    """

    def __init__(self, total_images: int, start_images: int, title: str, enabled: bool, epoch_images: int = 0) -> None:
        self._total, self._images, self._title, self._enabled = total_images, start_images, printable(title), enabled
        self._epoch_images = epoch_images
        self._clock = self._news_at = self._start = time.perf_counter()
        self._next_line = 0.0
        self._patience = Patience()
        self._first: tuple[int, float] | None = None  # images and time at the first update, after warm-up
        self._next_frame = 0.0
        self._values: list[str] = []  # losses and data wait from the last update
        self._shown: Sequence[str] = ()  # what the last frame or line showed
        self._final: Sequence[str] = ()  # what the last frame will show: the progress after the last step
        self._activity = FIRST_STEP  # what the loop does until it reports again
        self._live: Live | None = None
        self._ending = ExitStack()

    def __enter__(self) -> Self:
        self._clock = self._news_at = self._start = time.perf_counter()
        if not self._enabled:
            return self
        end_activity()
        if self._title:
            print_line(self._title)
        self._patience = Patience()
        if is_terminal(sys.stdout):
            self._start_bar(open_screen(file=user_stream(sys.stdout)))
        ticker = Ticker(_TICK_SECONDS, self._show_waiting)
        self._ending.callback(ticker.stop)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live and self._final:
            self._live.update(self._frame(self._images, self._final))
        self._ending.close()
        self._live = None

    def update(self, images: int, values: Mapping[str, float]) -> None:
        """Show the speed, the time left, the position and all losses.

        Without a terminal, print at most one line per second, and fewer in long runs; always print the last one.

        `values` may contain `images_per_second` and `data_wait` (the fraction of time spent waiting for data), with any
        prefix. Without `images_per_second`, the rate since the last update is shown.
        """
        if not self._enabled:
            return
        now = time.perf_counter()
        named = {name.rpartition("/")[2]: value for name, value in values.items()}
        speed = named.get("images_per_second", self._speed(images, now))
        self._first = self._first or (images, now)
        self._values = _losses(values) + ([f"data wait {named['data_wait']:.1%}"] if "data_wait" in named else [])
        shown = self._progress(images, now, speed)
        next_update = now + (now - self._clock)
        self._images, self._clock = images, now
        self._note(CURRENT_STEP, now, shown)
        self._patience.note_output()  # a line follows within _MAX_LINE_SECONDS, so `tick` need not print one
        if self._live is not None:
            self._draw(images, shown, now)
        elif next_update > self._next_line or images >= self._total:
            seconds = _LINE_SHARE * (now - self._start)
            self._next_line = now + min(max(seconds, _MIN_LINE_SECONDS), _MAX_LINE_SECONDS)
            self._print(shown)

    def tick(self, images: int) -> None:
        """Show the number of images after a step. Without a terminal, print a line only after a long silence.

        This is cheap enough to call after every step.
        """
        self._show_soon(CURRENT_STEP, images)

    def busy(self, text: str) -> None:
        """Show an activity between two steps, such as an evaluation; without a terminal, only after a long silence."""
        self._show_soon(text, self._images)

    def _show_soon(self, activity: str, images: int) -> None:
        """Show the progress, or an activity other than a step, unless something was shown a moment ago."""
        if not self._enabled:
            return
        now = time.perf_counter()
        self._note(activity, now)
        if now >= self._next_frame if self._live is not None else self._patience.is_over():
            is_step = activity == CURRENT_STEP
            items = self._progress(images, now, self._speed(images, now)) if is_step else [activity]
            if self._live is not None:
                self._draw(images, items, now)
            else:
                self._print(items)

    @contextmanager
    def during(self, activity: str) -> Iterator[None]:
        """Name what the loop does in a `with` block between two steps, which does not count towards the speed."""
        step, began = FIRST_STEP if self._activity == FIRST_STEP else CURRENT_STEP, time.perf_counter()
        self._note(activity, began)
        yield
        now = time.perf_counter()
        self._clock += now - began
        self._note(step, now)

    def position(self, images: int) -> str:
        """Return the position in the run: `epoch 4.6/12`, or `6,400/45,000 images` if epochs are not known."""
        if not self._epoch_images:
            return f"{images:>{len(f'{self._total:,}')},}/{self._total:,} images"
        return epoch(images, self._total, self._epoch_images)

    def line(self, text: str) -> None:
        """Print a line, above the bar if there is one."""
        if self._enabled:
            print_line(text)
            self._patience.note_output()

    def _note(self, activity: str, now: float, progress: Sequence[str] = ()) -> None:
        """Remember when the loop last reported, and what it does until it reports again."""
        self._activity, self._news_at, self._final = activity, now, progress or self._final

    def _show_waiting(self) -> None:
        """Show how long the current step, evaluation or save has taken, if the loop has not reported for a while.

        A background thread calls this, because the loop itself is busy. It draws nothing while steps are fast.
        """
        now = time.perf_counter()
        waited = now - self._news_at
        if waited < _STILL_SECONDS:
            return
        waiting = f"{self._activity}: {duration(waited)}"
        if self._live is not None:
            progress = [item for item in self._shown if item != self._activity]
            self._live.update(self._frame(self._images, [*progress, waiting]), refresh=True)
        elif self._patience.is_over():
            self._print([self.position(self._images), waiting])

    def _speed(self, images: int, now: float) -> float:
        """Return the images per second since the last update."""
        return (images - self._images) / max(now - self._clock, 1e-9)

    def _progress(self, images: int, now: float, speed: float) -> list[str]:
        place = [self.position(images)]
        if self._epoch_images:
            place.append(f"{images:>{len(f'{self._total:,}')},}/{self._total:,} images")
        return [rate(speed), f"ETA {duration(self._seconds_left(images, now, speed))}", *place, *self._values]

    def _print(self, items: Sequence[str]) -> None:
        print_line("  ".join(["", *items]))
        self._patience.note_output()

    def _draw(self, images: int, items: Sequence[str], now: float) -> None:
        assert self._live is not None
        self._shown = items
        due = now >= self._next_frame  # a skipped frame is replaced by the next one, or drawn at the end
        self._live.update(self._frame(images, items), refresh=due)
        if due:
            self._next_frame = now + _FRAME_SECONDS

    def _seconds_left(self, images: int, now: float, speed: float) -> float:
        """Estimate the time left from the average speed since the first update, including evaluations and saves.

        Until the second update, use `speed` instead.
        """
        first_images, first_clock = self._first or (images, now)
        if images > first_images:
            speed = (images - first_images) / max(now - first_clock, 1e-9)
        return max(self._total - images, 0) / speed if speed > 0 else float("inf")

    def _start_bar(self, console: Console) -> None:
        # No thread redraws the bar, because that would take time from the training loop.
        # Printed lines are redirected below, because the redirection in rich would bypass the log.
        self._live = Live(
            self._frame(self._images, [self.position(self._images)]),
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

    def _frame(self, images: int, items: Sequence[str]) -> Group:
        """Return a bar and the items below it, on as many lines as they need."""
        row = Table.grid(padding=(0, 1), expand=True)
        row.add_column(ratio=1)
        row.add_column(no_wrap=True)
        bar = ProgressBar(total=max(self._total, 1), completed=images)
        row.add_row(bar, Text(f"{images / max(self._total, 1):4.0%}"))
        width = self._live.console.width if self._live else sys.maxsize
        return Group(row, *(Text(line, no_wrap=True, overflow="ellipsis") for line in _packed(items, width)))


def _packed(items: Sequence[str], width: int) -> list[str]:
    """Distribute items over lines of at most `width` characters, without breaking an item."""
    lines: list[str] = []
    for item in items:
        if lines and len(lines[-1]) + 2 + len(item) <= width:
            lines[-1] += f"  {item}"
        else:
            lines.append(item)
    return lines


def _losses(values: Mapping[str, float]) -> list[str]:
    names = [name for name in values if name.partition("/")[0] not in _OTHER_GROUPS]
    names = [name for name in names if name.rpartition("/")[2] not in _NOT_LOSSES]
    return [f"{name} {four_digits(values[name])}" for name in names]
