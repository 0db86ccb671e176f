"""Log each rank's output to the run's logs/ folder; rank 0 also prints it."""

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
from paceline.core.printable import wrapped
from paceline.core.stacks import dump_stacks_on_signal, stop_dumping_stacks

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
