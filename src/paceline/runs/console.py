"""The output of each rank, kept in the run's logs/; that of rank 0 is printed too."""

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


def keep_output(folder: Path, rank: int) -> ExitStack:
    """Keep this process's output in logs/rank-N.txt until the returned stack is closed.

    After an error nobody closes it, so that the traceback is kept too.
    """
    path = folder / "logs" / f"rank-{rank}.txt"
    path.parent.mkdir(parents=True, exist_ok=True)
    ending = ExitStack()
    if rank == 0:
        _show_and_keep(path, ending)
    else:
        _only_keep(path, ending)
    atexit.register(ending.close)
    ending.callback(atexit.unregister, ending.close)
    return ending


def beneath(stream: TextIO) -> TextIO:
    """Return the stream that the user sees, beneath the copy to the log."""
    return stream.beneath if isinstance(stream, Tee) else stream


class Tee:
    """A text stream that is printed as it is, and logged as plain lines.

    All other attributes (isatty, fileno, encoding) are those of the stream beneath.
    """

    def __init__(self, beneath: TextIO, kept: TextIO, lock: threading.RLock) -> None:
        self.beneath = beneath
        self.shown = beneath  # the display puts a stream here that prints above its bar
        self._kept, self._lock, self._unfinished = kept, lock, ""

    def write(self, text: str) -> int:
        self.shown.write(text)
        with self._lock:
            lines, newline, self._unfinished = (self._unfinished + text).rpartition("\n")
            if newline:
                with suppress(OSError):  # a full disk is reported by what needs its files
                    self._kept.write("".join(f"{_plain(line)}\n" for line in lines.split("\n")))
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
                self._kept.write(f"{_plain(self._unfinished)}\n")
            self._unfinished = ""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.beneath, name)


def _plain(line: str) -> str:
    """Return a line as a terminal shows it in the end: no control codes, and only what was written last."""
    return _CONTROL_CODES.sub("", line).rstrip("\r").rpartition("\r")[2]


def _show_and_keep(path: Path, ending: ExitStack) -> None:
    kept = os.fdopen(open_append(path), "a", buffering=1, encoding="utf-8", errors="backslashreplace")
    ending.callback(kept.close)
    lock = threading.RLock()
    for name in ("stdout", "stderr"):
        shown = getattr(sys, name)
        tee = Tee(shown, kept, lock)
        setattr(sys, name, cast(TextIO, tee))
        ending.callback(tee.finish)
        ending.callback(setattr, sys, name, shown)


def _only_keep(path: Path, ending: ExitStack) -> None:
    """Send the process's file descriptors to the file, so that the output of C libraries goes there too."""
    kept = open_append(path)
    for stream, number in ((sys.stdout, 1), (sys.stderr, 2)):
        stream.flush()
        before = os.dup(number)
        os.dup2(kept, number)
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(line_buffering=True)  # a line that was printed is in the file even after a kill
        ending.callback(os.close, before)
        ending.callback(os.dup2, before, number)
        ending.callback(stream.flush)
    os.close(kept)
