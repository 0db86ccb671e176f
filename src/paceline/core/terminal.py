"""The terminal: the console that commands print to, and the lines about slow activities on stderr."""

from __future__ import annotations

import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import IO, Any, Self, TextIO, TypeVar, cast

from rich.console import Console
from rich.text import Text

from paceline.core.text import columns_of, duration, print_line, printable, printable_lines


class Screen(Console):
    """A console that escapes control characters in the text it prints.

    `soft_wrap` leaves long lines whole in files and pipes. On a terminal, long lines of text are always broken between
    words, because the terminal itself would break them inside a word.
    """

    def print(self, *objects: Any, soft_wrap: bool | None = None, **options: Any) -> None:
        if self.is_terminal and all(isinstance(one, str | Text) for one in objects):
            soft_wrap = False
        super().print(*objects, soft_wrap=soft_wrap, **options)

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(printable_lines(text), **options)


def open_screen(*, file: IO[str] | None = None, soft_wrap: bool = False) -> Console:
    """Return a console that prints text literally: [word] is not markup and :word: is not an emoji."""
    return Screen(file=file, soft_wrap=soft_wrap, highlight=False, markup=False, emoji=False)


def literal(text: str) -> Text:
    """Return text as a `rich.text.Text`, for functions that would parse markup in a string."""
    return Text(printable_lines(text))


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

    def __init__(self, first_seconds: float | None = None) -> None:
        self._seconds = FIRST_SECONDS if first_seconds is None else first_seconds
        self._printed_at = time.monotonic()

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


Item = TypeVar("Item")
SHOWN = "PACELINE_ACTIVITY"  # environment variable, which worker processes inherit
SECONDS_BETWEEN_TICKS = 0.25
SECONDS_BETWEEN_FRAMES = 0.1  # time between two updates of a counter on a terminal
SECONDS_UNTIL_COUNTED = 1  # on a terminal, the elapsed time is shown from this second on
ERASE_LINE, SHOW_CURSOR = "\r\x1b[2K", "\x1b[?25h"
CONTROLS = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")  # sequences that move the cursor, change colours or erase text


class _StatusLine:
    """Shows the current activity on stderr, and erases it before other text is printed.

    A background thread refreshes it, so that it changes even while the main thread is busy.
    """

    def __init__(self) -> None:
        self.stream: TextIO | None = None  # instead of `sys.stderr`, which may be redirected to a log file
        self._reset()
        # No status is being written during a fork, and a child process has no thread and shows no status.
        os.register_at_fork(
            before=lambda: self._lock.acquire(),
            after_in_parent=lambda: self._lock.release(),
            after_in_child=self._reset,
        )

    def _reset(self) -> None:
        self._lock, self._current, self._ticker = threading.RLock(), None, None
        self._drawn = ""
        self._is_within_line = False  # part of a line has been printed: a status would erase or interrupt it

    _current: Counter | None
    _ticker: Ticker | None

    def begin(self, counter: Counter) -> None:
        """Show an activity until it ends."""
        with self._lock:
            self.end()
            self._current = counter
            self._ticker = self._ticker or Ticker(SECONDS_BETWEEN_TICKS, self.refresh)

    def end(self, counter: Counter | None = None) -> None:
        """Stop showing an activity; without an argument, whichever is shown."""
        with self._lock:
            if counter in (None, self._current):
                self._draw("")
                self._current = None

    def refresh(self) -> None:
        """Show the text of the current activity if it has changed."""
        with self._lock:
            current = self._current
            if current is None or self._is_within_line:
                return
            if current.until():
                self.end()
            elif is_terminal(sys.stderr):
                self._draw(current.frame())
            elif line := current.line():
                print_line(line, sys.stderr)

    def print(self, text: str, stream: TextIO, *, ends: bool) -> int:
        """Write text in place of the activity, which is shown again below it unless the text `ends` it."""
        with self._lock:
            if text:
                self._draw("")
                if ends and self._current and self._current.total is None:
                    self._current = None
            if visible := CONTROLS.sub("", text) if stream is self.stream or stream.isatty() else "":
                self._is_within_line = not visible.endswith(("\n", "\r"))
            return stream.write(text)

    def take_over(self) -> None:
        """Erase the activity of another process, which writes to the same terminal, before the next text is printed."""
        self._drawn = ERASE_LINE if (self.stream or sys.stderr).isatty() else ""

    def _draw(self, text: str) -> None:
        if text == self._drawn:
            return
        target = self.stream or sys.stderr
        width = columns_of(target)
        shown = f"…{text[len(text) - width + 2 :]}" if 0 < width <= len(text) else text  # the count is at the end
        target.write(f"{ERASE_LINE}{shown}")
        target.flush()
        self._drawn = text


class WatchedStream:
    """A text stream that erases the status before text is written; other attributes are those of the stream."""

    def __init__(self, stream: TextIO, *, shows_results: bool) -> None:
        self._stream, self._shows_results = stream, shows_results

    def write(self, text: str) -> int:
        return _status_line.print(text, self._stream, ends=self._shows_results)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class Counter:
    """Counts a slow activity inside a `with` block, for example "measuring: 3 of 21 (14%)".

    On a terminal, the count is updated in place and erased at the end. Elsewhere, a line is printed after two seconds
    and then less often, up to every 10 seconds. Without a total, the seconds are counted.
    """

    def __init__(self, text: str, total: int | None, until: Callable[[], bool] = lambda: False) -> None:
        self.done, self.total, self.text, self.until = 0, total, printable(text), until
        self._began, self._patience = time.monotonic(), Patience(MAX_SECONDS if total is None else FIRST_SECONDS)
        self._next = 0.0

    def __enter__(self) -> Self:
        if _is_shown():
            _status_line.begin(self)
        return self

    def __exit__(self, *_: object) -> None:
        _status_line.end(self)

    def update(self, done: int) -> None:
        """Show how much is done, unless it was shown a moment ago."""
        self.done, now = done, time.monotonic()
        if now >= self._next:
            self._next = now + SECONDS_BETWEEN_FRAMES
            _status_line.refresh()

    def frame(self) -> str:
        """Return the text to show in place; empty to show nothing yet."""
        seconds = int(time.monotonic() - self._began)
        return self.describe() + (f"  {duration(seconds)}" if seconds >= SECONDS_UNTIL_COUNTED else "")

    def line(self) -> str:
        """Return the line to print if the status is not shown in place; empty if no line is due."""
        if not self._patience.is_over():
            return ""
        return f"{self.describe() or f'still {self.text} ({duration(time.monotonic() - self._began)})'} …"

    def describe(self) -> str:
        """Return how much is done; empty if there is no total."""
        if self.total is None:
            return ""
        return f"{self.text}: {self.done:,} of {self.total:,} ({self.done / max(self.total, 1):.0%})"


_reported: set[str] = set()  # activities that this process has printed
_status_line = _StatusLine()


def show_activities() -> None:
    """Turn on the lines for this process and for the processes that it starts."""
    os.environ[SHOWN] = "1"
    _watch_streams()
    if "torch" not in sys.modules:
        sys.meta_path.insert(0, _TorchNotice())


def show_activities_of_worker() -> None:
    """Count the seconds of activities in a worker process, if its launcher shows activities."""
    if _is_shown():
        _watch_streams()
        take_over_terminal()


def take_over_terminal() -> None:
    """Erase the activity of another process, which writes to the same terminal, before this process prints again."""
    if _is_shown():
        _status_line.take_over()


def _watch_streams() -> None:
    if not isinstance(sys.stderr, WatchedStream):
        _status_line.stream = sys.stderr
        sys.stdout = cast(TextIO, WatchedStream(sys.stdout, shows_results=True))
        sys.stderr = cast(TextIO, WatchedStream(sys.stderr, shows_results=False))


def restore_terminal() -> None:
    """Show the cursor and begin a new line, after a process was killed while it drew a progress bar."""
    if _is_shown() and is_terminal(sys.stderr):
        print(SHOW_CURSOR, file=sys.stderr, flush=True)


def activity(text: str, until: Callable[[], bool] = lambda: False) -> None:
    """Report an activity that may take seconds, such as "loading PyTorch".

    Only rank 0 prints the line, and a process prints the same line only once. The seconds are counted in place on a
    terminal; elsewhere, a line is printed every 10 seconds. The activity ends with the next activity, with the next
    line on stdout, or when `until` returns True.
    """
    if not _is_shown():
        return
    _status_line.end()
    if text not in _reported:
        _reported.add(text)
        print_line(f"{text} …", sys.stderr)
    _status_line.begin(Counter(text, None, until))


def end_activity() -> None:
    """Stop counting the seconds of the current activity."""
    _status_line.end()


def is_terminal(stream: TextIO) -> bool:
    """Return whether a stream is a terminal that can move its cursor."""
    return stream.isatty() and os.environ.get("TERM") not in ("dumb", "unknown")


def counted(items: Iterable[Item], text: str, total: int) -> Iterator[Item]:
    """Yield the items of a slow loop and show how many are done."""
    with Counter(text, total) as counter:
        for number, item in enumerate(items, start=1):
            yield item
            counter.update(number)


def _is_shown() -> bool:
    return SHOWN in os.environ and os.environ.get("RANK", "0") == "0"


class _TorchNotice:
    """An import finder that finds no modules. It reports the first import of torch, which takes seconds."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name == "torch":
            activity("loading PyTorch")
        return None
