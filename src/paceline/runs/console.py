"""What each rank prints, kept in the run's folder; rank 0's is shown too."""

from __future__ import annotations

import atexit
import os
import re
import sys
import threading
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, TextIO, cast

_CONTROL_CODES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])")


def keep_output(folder: Path, rank: int) -> ExitStack:
    """Keeps this process's output in logs/rank-N.txt from now on; closing what it returns ends that.

    A command never closes it, so that a last traceback is kept too.
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
    """The stream that a person sees, past the copy that is kept."""
    return stream.beneath if isinstance(stream, Tee) else stream


class Tee:
    """A text stream that is shown as it is, and kept as plain lines.

    Whatever else is asked of it (isatty, fileno, encoding) the stream beneath answers.
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
                with suppress(OSError):  # a full disk is for those to say who need what they write
                    self._kept.write("".join(f"{_plain(line)}\n" for line in lines.split("\n")))
            # Frames of a progress bar that were already overdrawn need no room.
            self._unfinished = self._unfinished[self._unfinished.rstrip("\r").rfind("\r") + 1 :]
        return len(text)

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        self.shown.flush()

    def finish(self) -> None:
        """Keeps a last line that has no end."""
        with self._lock:
            if self._unfinished:
                self._kept.write(f"{_plain(self._unfinished)}\n")
            self._unfinished = ""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.beneath, name)


def _plain(line: str) -> str:
    """What a line shows in the end: no control codes, and of what was overdrawn the last."""
    return _CONTROL_CODES.sub("", line).rstrip("\r").rpartition("\r")[2]


def _show_and_keep(path: Path, ending: ExitStack) -> None:
    kept = path.open("a", buffering=1, encoding="utf-8", errors="backslashreplace")
    ending.callback(kept.close)
    lock = threading.RLock()
    for name in ("stdout", "stderr"):
        shown = getattr(sys, name)
        tee = Tee(shown, kept, lock)
        setattr(sys, name, cast(TextIO, tee))
        ending.callback(tee.finish)
        ending.callback(setattr, sys, name, shown)


def _only_keep(path: Path, ending: ExitStack) -> None:
    """Sends the process's own file descriptors to the file: what libraries in C print goes there too."""
    kept = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
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
