"""Write the Python stacks of all threads to a file when a signal arrives, even if the process hangs in C code."""

from __future__ import annotations

import faulthandler
import os
import signal
import threading
from pathlib import Path

from paceline.core.files import open_append
from paceline.core.flight_recorder import recorder

STACK_SIGNAL = signal.SIGUSR2

_file: int | None = None


def dump_stacks_on_signal(log: Path) -> None:
    """Make STACK_SIGNAL, and crashes, append the stacks to a log file; announce this in the flight recorder."""
    global _file
    stop_dumping_stacks()
    _file = open_append(log)
    faulthandler.enable(file=_file)  # when libtorch aborts the process, for example
    faulthandler.register(STACK_SIGNAL, file=_file, all_threads=True)
    recorder().announce_logs(str(log.parent.absolute()), dumps_stacks=True)


def stop_dumping_stacks() -> None:
    """Undo `dump_stacks_on_signal`. From then on, the signal is ignored, because one may still be pending."""
    global _file
    if _file is None:
        return
    recorder().announce_logs("", dumps_stacks=False)
    faulthandler.disable()
    faulthandler.unregister(STACK_SIGNAL)
    if threading.current_thread() is threading.main_thread():
        signal.signal(STACK_SIGNAL, signal.SIG_IGN)
    os.close(_file)
    _file = None


def dump_stacks_now(reason: str) -> None:
    """Append the reason and the stacks of all threads to the log file; do nothing without one."""
    if _file is not None:
        os.write(_file, f"{reason}; the stacks of all threads:\n".encode())
        faulthandler.dump_traceback(file=_file, all_threads=True)
