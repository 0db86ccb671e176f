"""Keep stdout and stderr usable if they are closed, their disk is full or their reader has ended.

A closed stream is replaced by one on which every write fails, so that no file takes its number. A failed write to
stderr is ignored. A failed write to stdout ends the command with one line, except while it trains: a run is worth more
than what it prints, which its folder contains, too.
"""

from __future__ import annotations

import io
import os
import select
import sys
import threading
from typing import Any, cast

_can_be_lost = {"stderr"}  # streams whose failures are ignored


def open_streams() -> None:
    """Open stdout and stderr again so that a failed write does not print a traceback."""
    while (free := os.open(os.devnull, os.O_RDONLY)) <= 2:
        os.set_inheritable(free, True)
    os.close(free)
    for number, name in ((1, "stdout"), (2, "stderr")):
        before: Any = getattr(sys, name) or io.TextIOWrapper(io.BytesIO(), line_buffering=number == 2)
        stream = io.TextIOWrapper(
            io.BufferedWriter(_Output(number, name)),
            encoding=before.encoding,
            errors=before.errors,
            line_buffering=before.line_buffering or before.write_through,
        )
        setattr(sys, name, stream)


def outlive_stdout() -> None:
    """Ignore failed writes to stdout from now on, because the command trains."""
    _can_be_lost.add("stdout")


def is_lost(name: str) -> bool:
    """Return whether a write to this stream has failed."""
    return name in _Output.lost


class _Output(io.FileIO):
    """A file descriptor whose first failed write may raise UserError; what is written later is dropped."""

    lost: set[str] = set()

    def __init__(self, number: int, title: str) -> None:
        super().__init__(number, "w", closefd=False)
        self._title = title

    def write(self, data: Any, /) -> int:
        try:
            while (written := cast(int | None, super().write(data))) is None:  # the stream does not block, and is full
                select.select([], [self], [])
            return written
        except OSError as error:
            is_first = self._title not in self.lost
            self.lost.add(self._title)
            if is_first and self._title not in _can_be_lost and threading.current_thread() is threading.main_thread():
                if isinstance(error, BrokenPipeError):
                    raise
                from paceline.core.errors import UserError  # later, because the command first handles Ctrl-C

                raise UserError(f"{self._title}: cannot be written: {error.strerror}; redirect it to a file") from None
            return len(data)
