"""A status below the printed lines: rewritten in place on a terminal, and printed as plain lines elsewhere."""

from __future__ import annotations

import os
import re
import sys
import threading
from collections.abc import Iterable
from typing import Any, TextIO, cast

from paceline.core.printable import columns_of, print_line
from paceline.core.ticker import Ticker

SECONDS_BETWEEN_TICKS = 0.25
ERASE_LINE = "\r\x1b[2K"
CONTROLS = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")  # sequences that move the cursor, change colours or erase text


class Status:
    """What a process is doing, as text that changes with time."""

    in_place: bool  # whether the status is rewritten in place
    ends_with_output: bool  # whether the next line on stdout ends the status

    def is_over(self) -> bool:
        """Return whether the status no longer applies."""
        return False

    def frame(self) -> str:
        """Return the text to show in place; empty to show nothing yet."""
        raise NotImplementedError

    def line(self) -> str:
        """Return the line to print if the status is not shown in place; empty if no line is due."""
        raise NotImplementedError


class StatusLine:
    """Shows the latest status on stderr, and erases it before other text is printed.

    When a status ends, the one before it is shown again. A background thread refreshes the status, so that it
    changes even while the main thread is busy.
    """

    def __init__(self) -> None:
        self._stream: TextIO | None = None
        self._reset()
        # No status is being written during a fork, and a child process has no thread and shows no status.
        os.register_at_fork(
            before=lambda: self._lock.acquire(),
            after_in_parent=lambda: self._lock.release(),
            after_in_child=self._reset,
        )

    def _reset(self) -> None:
        self._lock = threading.RLock()
        self._statuses: list[Status] = []
        self._ticker: Ticker | None = None
        self._drawn = ""
        self._is_within_line = False  # part of a line has been printed: a status would erase or interrupt it

    def write_to(self, stream: TextIO) -> None:
        """Write to this stream instead of `sys.stderr`, which may be redirected to a log file."""
        self._stream = stream

    def begin(self, status: Status) -> None:
        """Show a status until it ends."""
        with self._lock:
            self._erase()
            self._statuses.append(status)
            self._ticker = self._ticker or Ticker(SECONDS_BETWEEN_TICKS, self.refresh)

    def end(self, status: Status | None = None) -> None:
        """Stop showing a status and those that began after it; without an argument, all of them."""
        with self._lock:
            if status is None or status in self._statuses:
                self._erase()
                del self._statuses[self._statuses.index(status) if status else 0 :]

    def refresh(self, status: Status | None = None) -> None:
        """Show the text of the current status if it has changed; with an argument, only if that status is current."""
        with self._lock:
            current = self._statuses[-1] if self._statuses else None
            if current is None or (status is not None and status is not current):
                return
            if current.is_over():
                self.end(current)
            elif self._is_within_line:
                return
            elif current.in_place:
                self._draw(current.frame())
            elif line := current.line():
                print_line(line, sys.stderr)

    def give_way(self, ends: bool) -> None:
        """Erase the status, because other text is about to be printed; text on stdout also ends an activity."""
        with self._lock:
            self._erase()
            if ends:
                self._statuses = [status for status in self._statuses if not status.ends_with_output]

    def print(self, text: str, stream: TextIO, *, ends: bool) -> int:
        """Write text to a stream in place of the status, which is shown again below the text."""
        with self._lock:
            if text:
                self.give_way(ends)
            visible = CONTROLS.sub("", text) if stream is self._target() or stream.isatty() else ""
            if visible:
                self._is_within_line = not visible.endswith(("\n", "\r"))
            return stream.write(text)

    def take_over(self) -> None:
        """Erase the status of another process, which writes to the same terminal, before the next text is printed."""
        self._drawn = ERASE_LINE if self._target().isatty() else ""

    def _draw(self, text: str) -> None:
        width = columns_of(self._target())
        text = f"…{text[len(text) - width + 2 :]}" if 0 < width <= len(text) else text  # the count is at the end
        if text != self._drawn:
            self._write(f"{ERASE_LINE}{text}")
            self._drawn = text

    def _erase(self) -> None:
        if self._drawn:
            self._drawn = ""
            self._write(ERASE_LINE)

    def _write(self, text: str) -> None:
        target = self._target()
        target.write(text)
        target.flush()

    def _target(self) -> TextIO:
        return self._stream or sys.stderr


class WatchedStream:
    """A text stream that erases the status before text is written; other attributes are those of the stream."""

    def __init__(self, stream: TextIO, status_line: StatusLine, *, shows_results: bool) -> None:
        self._stream, self._status_line, self._shows_results = stream, status_line, shows_results

    def write(self, text: str) -> int:
        return self._status_line.print(text, self._stream, ends=self._shows_results)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def watch_streams(status_line: StatusLine) -> None:
    """Erase the status before this process writes to stdout or stderr."""
    if isinstance(sys.stderr, WatchedStream):
        return
    status_line.write_to(sys.stderr)
    sys.stdout = cast(TextIO, WatchedStream(sys.stdout, status_line, shows_results=True))
    sys.stderr = cast(TextIO, WatchedStream(sys.stderr, status_line, shows_results=False))
