"""The entry point of the `paceline` command. It handles Ctrl-C and SIGTERM before it imports the rest."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from contextlib import suppress
from functools import partial
from types import FrameType
from typing import NoReturn

from paceline.core.output import open_streams

STOPS = (signal.SIGTERM, signal.SIGUSR1)  # end a command like Ctrl-C, so that it removes its temporary files
PATIENCE_SECONDS = 5.0  # then the main thread hangs outside Python, and the process ends without it
STDERR = 2  # file descriptor
ERASE_LINE = "\r\x1b[K"


_received = signal.SIGINT  # the last signal that ended this command


def main() -> None:
    """Run the `paceline` command and exit."""
    try:
        open_streams()
        handle_interrupts()
        from paceline.cli.app import main as run

        run()
    except KeyboardInterrupt:  # while modules are searched for, or between the command and its end
        print_interrupted()
        os._exit(exit_code())


class Interrupted(Exception):
    """Raised when the user presses Ctrl-C during a command; the parser does not intercept this exception."""


def handle_interrupts() -> None:
    """Make Ctrl-C end this process at once while it imports modules, and SIGTERM end it like Ctrl-C.

    A module may catch every exception while it is imported. A KeyboardInterrupt would then have no effect. A signal
    that this process was started to ignore stays ignored.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupt)
    stops = [number for number in STOPS if signal.getsignal(number) is signal.SIG_DFL]
    for number in stops:
        signal.signal(number, _interrupt)
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    threading.Thread(target=_end_if_stuck, args=[reader], name="stop", daemon=True).start()
    mask = partial(signal.pthread_sigmask, mask=stops)  # until a child has its own handlers
    os.register_at_fork(
        before=lambda: mask(signal.SIG_BLOCK),
        after_in_parent=lambda: mask(signal.SIG_UNBLOCK),
        after_in_child=lambda: _handle_as_before(stops),
    )


def exit_code() -> int:
    """Return the exit code of a command that a signal ended, as in shells."""
    return 128 + _received


def message() -> str:
    """Return the line that reports which signal ended the command."""
    return f"paceline: {'interrupted' if _received == signal.SIGINT else f'stopped by {_received.name}'}"


def print_interrupted() -> None:
    """Report the signal. The function does not use the stream: a signal may have interrupted the owner of its lock."""
    with suppress(OSError):  # stderr is closed or its disk is full
        os.write(STDERR, f"{ERASE_LINE if os.isatty(STDERR) else ''}{message()}\n".encode())


def _interrupt(number: int, frame: FrameType | None) -> None:
    global _received
    _received = signal.Signals(number)
    while frame is not None:
        is_module = frame.f_code.co_name == "<module>"
        if is_module and frame.f_globals.get("__name__") != "__main__":
            print_interrupted()
            _exit_now(exit_code())
        frame = frame.f_back
    raise KeyboardInterrupt


def _end_if_stuck(reader: int) -> None:
    """End this process some seconds after a signal, unless the command handles the signal itself."""
    while numbers := os.read(reader, 1):
        if numbers[0] in STOPS and signal.getsignal(numbers[0]) is _interrupt:
            time.sleep(PATIENCE_SECONDS)
            _exit_now(128 + numbers[0])


def _exit_now(code: int) -> NoReturn:
    """Exit without unwinding the stack, but remove temporary files."""
    if files := sys.modules.get("paceline.core.files"):  # the module that creates them
        with suppress(AttributeError):  # it is being imported
            files.remove_unfinished()
    os._exit(code)


def _handle_as_before(stops: list[signal.Signals]) -> None:
    """Make a signal end a forked process at once: it has no thread that would do so, and no temporary files."""
    signal.set_wakeup_fd(-1)
    for number in stops:
        if signal.getsignal(number) is _interrupt:
            signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, stops)
