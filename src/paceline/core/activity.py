"""Report what a command is doing before it prints a result, so that no command is silent for seconds.

The lines go to stderr, so that stdout contains only results. They are off in programs that import Paceline and on in
the `paceline` command and the worker processes that it starts.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType, TracebackType
from typing import Self, TextIO, TypeVar

from paceline.core.numbers import duration
from paceline.core.printable import print_line, printable
from paceline.core.status_line import Status, StatusLine, watch_streams
from paceline.core.ticker import MAX_SECONDS, Patience

Item = TypeVar("Item")
SHOWN = "PACELINE_ACTIVITY"  # environment variable, which worker processes inherit
SECONDS_BETWEEN_FRAMES = 0.1  # time between two updates of a counter on a terminal
SECONDS_UNTIL_COUNTED = 1  # on a terminal, the elapsed time is shown from this second on
SHOW_CURSOR = "\x1b[?25h"
_reported: set[str] = set()  # activities that this process has printed
_status_line = StatusLine()


def show_activities() -> None:
    """Turn on the lines for this process and for the processes that it starts."""
    os.environ[SHOWN] = "1"
    watch_streams(_status_line)
    if "torch" not in sys.modules:
        sys.meta_path.insert(0, _TorchNotice())


def show_activities_of_worker() -> None:
    """Count the seconds of activities in a worker process, if its launcher shows activities."""
    if _is_shown():
        watch_streams(_status_line)
        take_over_terminal()


def take_over_terminal() -> None:
    """Erase the count of another process, which writes to the same terminal, before this process prints again."""
    if _is_shown():
        _status_line.take_over()


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
    _status_line.give_way(ends=True)
    if text not in _reported:
        _reported.add(text)
        print_line(f"{text} …", sys.stderr)
    _status_line.begin(_Activity(printable(text), until))


def end_activity() -> None:
    """Stop counting the seconds of the current activity."""
    _status_line.end()


def is_terminal(stream: TextIO) -> bool:
    """Return whether a stream is a terminal that can move its cursor."""
    return stream.isatty() and os.environ.get("TERM") not in ("dumb", "unknown")


class _Activity(Status):
    """The seconds since an activity began."""

    def __init__(self, text: str, until: Callable[[], bool]) -> None:
        self.ends_with_output, self.in_place = True, is_terminal(sys.stderr)
        self._text, self._until = text, until
        self._began = self._printed_at = time.monotonic()

    def is_over(self) -> bool:
        return self._until()

    def frame(self) -> str:
        seconds = int(time.monotonic() - self._began)
        return f"  {duration(seconds)}" if seconds >= SECONDS_UNTIL_COUNTED else ""

    def line(self) -> str:
        now = time.monotonic()
        if now - self._printed_at < MAX_SECONDS:
            return ""
        self._printed_at = now
        return f"still {self._text} ({duration(now - self._began)}) …"


class Counter(Status):
    """Counts a slow activity inside a `with` block, for example "measuring: 3 of 21 (14%)".

    On a terminal, the count is updated in place and erased at the end. Elsewhere, a line is printed after two seconds
    and then at least every 10 seconds.
    """

    def __init__(self, text: str, total: int) -> None:
        self.ends_with_output, self.in_place = False, is_terminal(sys.stderr)
        self._text, self._total, self._done = printable(text), total, 0
        self._began, self._patience, self._next = time.monotonic(), Patience(), 0.0

    def __enter__(self) -> Self:
        if _is_shown():
            _status_line.begin(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        _status_line.end(self)

    def update(self, done: int) -> None:
        """Show how much is done, unless it was shown a moment ago."""
        self._done = done
        now = time.monotonic()
        if now >= self._next:
            self._next = now + SECONDS_BETWEEN_FRAMES
            _status_line.refresh(self)

    def frame(self) -> str:
        seconds = int(time.monotonic() - self._began)
        return f"{self._count()}{f'  {duration(seconds)}' if seconds >= SECONDS_UNTIL_COUNTED else ''}"

    def line(self) -> str:
        return f"{self._count()} …" if self._patience.is_over() else ""

    def _count(self) -> str:
        return f"{self._text}: {self._done:,} of {self._total:,} ({self._done / max(self._total, 1):.0%})"


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
