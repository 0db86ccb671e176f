"""Report what a command is doing before it prints a result, so that no command is silent for seconds.

The lines go to stderr, so that stdout contains only results. They are off in programs that import Paceline and on in
the `paceline` command and the worker processes that it starts.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType, TracebackType
from typing import Self, TextIO, TypeVar

from paceline.core.printable import print_line, printable

Item = TypeVar("Item")
SHOWN = "PACELINE_ACTIVITY"  # environment variable, which worker processes inherit
SECONDS_BETWEEN_LINES = 2.0  # time between two lines of a counter if stderr is not a terminal
SECONDS_BETWEEN_FRAMES = 0.1  # time between two updates of a counter on a terminal
_reported: set[str] = set()  # activities that this process has printed
ERASE_LINE = "\r\x1b[2K"


def show_activities() -> None:
    """Turn on the lines for this process and for the processes that it starts."""
    os.environ[SHOWN] = "1"
    if "torch" not in sys.modules:
        sys.meta_path.insert(0, _TorchNotice())


def activity(text: str) -> None:
    """Report an activity that may take seconds, such as "loading PyTorch".

    Only rank 0 prints the line, and a process prints the same line only once.
    """
    if _is_shown() and text not in _reported:
        _reported.add(text)
        print_line(f"{text} …", sys.stderr)


def is_terminal(stream: TextIO) -> bool:
    """Return whether a stream is a terminal that can move its cursor."""
    return stream.isatty() and os.environ.get("TERM") not in ("dumb", "unknown")


class Counter:
    """Counts a slow activity inside a `with` block, for example "measuring: 3 of 21".

    On a terminal, the count is updated in place and erased at the end. Elsewhere, a line is printed every two seconds.
    """

    def __init__(self, text: str, total: int) -> None:
        self._text, self._total = printable(text), total
        self._enabled, self._in_place = _is_shown(), is_terminal(sys.stderr)
        self._next = time.monotonic() + (0 if self._in_place else SECONDS_BETWEEN_LINES)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._enabled and self._in_place:
            print(ERASE_LINE, end="", file=sys.stderr, flush=True)

    def update(self, done: int) -> None:
        """Show how much is done, unless the last update was a moment ago."""
        now = time.monotonic()
        if not self._enabled or now < self._next:
            return
        line = f"{self._text}: {done:,} of {self._total:,} …"
        if self._in_place:
            self._next = now + SECONDS_BETWEEN_FRAMES
            print(f"{ERASE_LINE}{line}", end="", file=sys.stderr, flush=True)
        else:
            self._next = now + SECONDS_BETWEEN_LINES
            print_line(line, sys.stderr)


def counted(items: Iterable[Item], text: str, total: int) -> Iterator[Item]:
    """Yield the items of a slow loop and show how many are done."""
    with Counter(text, total) as counter:
        for number, item in enumerate(items, start=1):
            yield item
            counter.update(number)


def _is_shown() -> bool:
    return SHOWN in os.environ and os.environ.get("RANK", "0") == "0"


class _TorchNotice:
    """A finder that finds no module: it reports the first import of torch, which takes seconds."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name == "torch":
            activity("loading PyTorch")
        return None
