"""Child processes that report progress to their parent and are killed when the parent dies."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

PR_SET_PDEATHSIG = 1  # from <linux/prctl.h>
PULSE_FILE = "PACELINE_PULSE_FILE"  # environment variable with the path to a file that is written to report progress
PROCESS = "process-"  # a child's file in its parent's folder is named after the child: process-PID
SECONDS_BETWEEN_BEATS = 0.5

_beaten_at = 0.0


def die_with_parent(parent: int | None = None) -> None:
    """Make the kernel kill this process when the thread that started it ends, even if that thread is killed.

    `parent` is the ID of the parent process. If the parent is already dead, this process is killed immediately.
    """
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if parent is not None and os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def is_watched() -> bool:
    """Return whether a launcher watches this process and ends it if it hangs or if another rank ends."""
    return PULSE_FILE in os.environ


def prepare() -> None:
    """Report that this process is starting up: no progress is expected until the next `beat`."""
    if PULSE_FILE in os.environ:
        with suppress(OSError):
            Path(os.environ[PULSE_FILE]).write_bytes(b"")


def beat() -> None:
    """Report progress. This is cheap enough to call in every step."""
    global _beaten_at
    now = time.monotonic()
    if now - _beaten_at < SECONDS_BETWEEN_BEATS:
        return
    _beaten_at = now
    if PULSE_FILE in os.environ:
        try:
            Path(os.environ[PULSE_FILE]).write_bytes(b"1")
        except OSError:
            os.environ.pop(PULSE_FILE)  # the parent has deleted the file


def registered_processes(folder: Path, parent: int) -> dict[int, bool]:
    """Return the processes that have a file in the folder, and whether each is alive and a child of `parent`."""
    found = [int(file.name.removeprefix(PROCESS)) for file in folder.glob(f"{PROCESS}*")]
    return {process: is_child(process, parent) for process in found}


def has_failed_peer() -> bool:
    """Return whether another child of this process's launcher has failed: it has ended without removing its file."""
    if PULSE_FILE not in os.environ:
        return False
    return not all(registered_processes(Path(os.environ[PULSE_FILE]).parent, os.getppid()).values())


class Watch(threading.Thread):
    """A thread that calls a function if this process makes no progress for a given time.

    It is used if no launcher watches this process, or `even_if_watched`. The function runs in this thread, because the
    main thread is stuck.
    """

    def __init__(self, timeout: float, on_silence: Callable[[float], None], *, even_if_watched: bool = False) -> None:
        super().__init__(name="watch", daemon=True)
        self._is_used = even_if_watched or not is_watched()
        self._timeout, self._on_silence = timeout, on_silence
        self._began, self._ended = time.monotonic(), threading.Event()

    def run(self) -> None:
        interval, silent, last = min(1.0, self._timeout / 4), 0.0, _beaten_at
        while not self._ended.wait(interval):
            # Intervals are added up so that time during which the process was suspended is not counted.
            silent, last = (silent + interval if last == _beaten_at else 0.0), _beaten_at
            if last > self._began and silent > self._timeout:
                self._on_silence(silent)
                return

    def __enter__(self) -> Watch:
        if self._is_used:
            self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()


def has_exited_with_zero(child: int) -> bool:
    """Return whether a child process that is no longer alive ended with exit code 0; False while its threads end.

    The exit code stays available to the owner of the child. If the owner has already read it, it was 0: otherwise, the
    owner would have reported a failure.
    """
    try:
        ended = os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return True
    return ended is not None and ended.si_code == os.CLD_EXITED and ended.si_status == 0


def is_child(process: int, parent: int) -> bool:
    """Return whether a process is alive, not a zombie, and a child of `parent`."""
    try:
        state, started_by = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[:2]
    except (OSError, ValueError):
        return False
    return state not in "ZX" and int(started_by) == parent
