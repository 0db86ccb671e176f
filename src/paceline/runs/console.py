"""The output of each rank, logged in the run's logs/; that of rank 0 is printed too."""

from __future__ import annotations

import atexit
import os
import re
import sys
import threading
from collections.abc import Iterable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, TextIO, cast

from paceline.core.files import open_append

_CONTROL_CODES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])")


def log_output(folder: Path, rank: int) -> ExitStack:
    """Log this process's output in logs/rank-N.txt until the returned stack is closed.

    After an error nobody closes it, so that the traceback is logged too.
    """
    path = folder / "logs" / f"rank-{rank}.txt"
    path.parent.mkdir(parents=True, exist_ok=True)
    ending = ExitStack()
    if rank == 0:
        _print_and_log(path, ending)
    else:
        _only_log(path, ending)
    atexit.register(ending.close)
    ending.callback(atexit.unregister, ending.close)
    return ending


def user_stream(stream: TextIO) -> TextIO:
    """Return the stream that the user sees, without the copy to the log."""
    return stream.stream if isinstance(stream, Tee) else stream


class Tee:
    """A text stream that is printed as it is, and logged as plain lines.

    All other attributes (isatty, fileno, encoding) are those of the stream.
    """

    def __init__(self, stream: TextIO, log: TextIO, lock: threading.RLock) -> None:
        self.stream = stream
        self.shown = stream  # the display puts a stream here that prints above its bar
        self._log, self._lock, self._unfinished = log, lock, ""

    def write(self, text: str) -> int:
        self.shown.write(text)
        with self._lock:
            lines, newline, self._unfinished = (self._unfinished + text).rpartition("\n")
            if newline:
                with suppress(OSError):  # a full disk is reported by what needs its files
                    self._log.write("".join(f"{_plain(line)}\n" for line in lines.split("\n")))
            # Frames of a progress bar that were overwritten already take no room.
            self._unfinished = self._unfinished[self._unfinished.rstrip("\r").rfind("\r") + 1 :]
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        self.shown.flush()

    def finish(self) -> None:
        """Log a last line that has no newline."""
        with self._lock:
            if self._unfinished:
                self._log.write(f"{_plain(self._unfinished)}\n")
            self._unfinished = ""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


def _plain(line: str) -> str:
    """Return a line as a terminal shows it in the end: no control codes, and only what was written last."""
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
    """Send the process's file descriptors to the file, so that the output of C libraries is logged too."""
    log = open_append(path)
    for stream, number in ((sys.stdout, 1), (sys.stderr, 2)):
        stream.flush()
        before = os.dup(number)
        os.dup2(log, number)
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(line_buffering=True)  # a printed line is in the file even after a kill
        ending.callback(os.close, before)
        ending.callback(os.dup2, before, number)
        ending.callback(stream.flush)
    os.close(log)
