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
SECONDS_BETWEEN_BEATS = LONGEST_INTERVAL_SECONDS = 0.5

BUSY_SHARE = 0.02  # of one core: a process that starts up and uses more CPU time makes progress
SPARE_CPU_SECONDS = 0.1  # added to that share, since the system counts CPU time in steps of 0.01 s

_beaten_at = _longest_gap = 0.0


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
    global _beaten_at
    _beaten_at = 0.0
    if PULSE_FILE in os.environ:
        with suppress(OSError):
            Path(os.environ[PULSE_FILE]).write_bytes(b"")


def beat() -> None:
    """Report progress. This is cheap enough to call in every step."""
    global _beaten_at, _longest_gap
    now = time.monotonic()
    if now - _beaten_at < SECONDS_BETWEEN_BEATS:
        return
    _longest_gap = max(_longest_gap, now - _beaten_at) if _beaten_at else 0.0
    _beaten_at = now
    if PULSE_FILE in os.environ:
        try:
            Path(os.environ[PULSE_FILE]).write_bytes(b"1")
        except OSError:
            os.environ.pop(PULSE_FILE)  # the parent has deleted the file


def longest_gap() -> float:
    """Return the longest time between two beats of this process, in seconds."""
    return _longest_gap


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
    """A thread that calls a function whenever this process makes no progress for longer than `patience()` seconds.

    Until the first beat, the use of CPU time counts as progress, unless `is_stopping()`. Any other patience than before
    starts the silence anew. The function runs in this thread, because the main thread is stuck.
    """

    def __init__(
        self,
        patience: Callable[[], float],
        on_silence: Callable[[float], None],
        is_stopping: Callable[[], bool] = lambda: False,
    ) -> None:
        super().__init__(name="watch", daemon=True)
        self._patience, self._on_silence, self._is_stopping = patience, on_silence, is_stopping
        self._ended = threading.Event()

    def run(self) -> None:
        silent, counted, patience = 0.0, _cpu_seconds(), self._patience()
        interval, last = min(LONGEST_INTERVAL_SECONDS, patience / 4), (_beaten_at, patience)
        while not self._ended.wait(interval):
            patience = self._patience()
            moved, last = last != (_beaten_at, patience), (_beaten_at, patience)
            if not (moved or _beaten_at or self._is_stopping()):
                used = _cpu_seconds()
                moved = used - counted > BUSY_SHARE * silent + SPARE_CPU_SECONDS
                counted = used if moved else counted
            # Intervals are added up so that time during which the process was suspended is not counted.
            silent = 0.0 if moved else silent + interval
            if silent > patience:
                self._on_silence(silent)
                silent = 0.0

    def __enter__(self) -> Watch:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()


def _cpu_seconds(process: str = "self") -> float:
    """Return the CPU time that a process and its descendants have used; the time of day if it is unknown."""
    try:
        numbers = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[11:15]
        children = [file.read_text() for file in Path(f"/proc/{process}/task").glob("*/children")]
    except OSError:  # not Linux, or a process that has just ended
        return time.monotonic() if process == "self" else 0.0
    own = sum(map(int, numbers)) / os.sysconf("SC_CLK_TCK")
    return own + sum(_cpu_seconds(child) for child in " ".join(children).split())


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
