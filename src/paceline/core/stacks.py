"""Write the Python stacks of all threads to a file when a signal arrives, even if the process hangs in C code.

A program that calls Paceline may use the signal or faulthandler itself. Existing handlers are left unchanged.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import threading
from dataclasses import dataclass
from pathlib import Path

from paceline.core.files import open_append
from paceline.core.flight_recorder import recorder
from paceline.core.heartbeat import is_watched

STACK_SIGNAL = signal.SIGUSR2


@dataclass(frozen=True)
class _Dump:
    """The handlers that were installed, and that are to be removed later."""

    file: int  # descriptor of the log file
    on_crash: bool
    on_signal: bool


_dump: _Dump | None = None


def dump_stacks_on_signal(log: Path, *, on_crash: bool = True) -> None:
    """Make STACK_SIGNAL, and crashes, append the stacks to a log file; announce this in the flight recorder."""
    global _dump
    stop_dumping_stacks()
    _dump = _Dump(open_append(log), on_crash and not faulthandler.is_enabled(), not _is_handled(STACK_SIGNAL))
    if _dump.on_crash:
        faulthandler.enable(file=_dump.file)  # when libtorch aborts the process, for example
    if _dump.on_signal:
        faulthandler.register(STACK_SIGNAL, file=_dump.file, all_threads=True)
    recorder().announce_logs(str(log.parent.absolute()), dumps_stacks=_dump.on_signal)


def stop_dumping_stacks() -> None:
    """Undo `dump_stacks_on_signal`. A worker ignores the signal from then on, because one may still be pending."""
    global _dump
    if _dump is None:
        return
    recorder().announce_logs("", dumps_stacks=False)
    if _dump.on_crash:
        faulthandler.disable()
    if _dump.on_signal and not callable(signal.getsignal(STACK_SIGNAL)):  # the program may have replaced the handler
        faulthandler.unregister(STACK_SIGNAL)  # restores the previous handler
        if is_watched() and threading.current_thread() is threading.main_thread():
            signal.signal(STACK_SIGNAL, signal.SIG_IGN)
    os.close(_dump.file)
    _dump = None


def dump_stacks_now(reason: str) -> bool:
    """Append the reason and the stacks of all threads to the log file; return False if there is none."""
    if _dump is not None:
        os.write(_dump.file, f"{reason}; the stacks of all threads:\n".encode())
        faulthandler.dump_traceback(file=_dump.file, all_threads=True)
    return _dump is not None


def _is_handled(number: signal.Signals) -> bool:
    """Return whether this process has a handler for a signal, even one that C code or faulthandler has installed."""
    if callable(signal.getsignal(number)):
        return True
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:  # not Linux
        return False
    caught = next((int(line.split()[1], 16) for line in lines if line.startswith("SigCgt:")), 0)
    return bool(caught >> (number - 1) & 1)
