"""Ctrl-C in a command: the exception that reports it, and its handler."""

from __future__ import annotations

import os
import signal
from types import FrameType

EXIT_CODE = 130
STDERR = 2  # file descriptor
MESSAGE = "paceline: interrupted"
ERASE_LINE = "\r\x1b[K"


class Interrupted(Exception):
    """Raised when the user presses Ctrl-C during a command; the parser does not intercept this exception."""


def handle_interrupts() -> None:
    """Make Ctrl-C end this process at once while it imports modules, unless it was started to ignore Ctrl-C.

    A module may catch every exception while it is imported. A KeyboardInterrupt would then have no effect.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupt)


def print_interrupted() -> None:
    """Report Ctrl-C. The function does not use the stream: a signal may have interrupted the owner of its lock."""
    os.write(STDERR, f"{ERASE_LINE if os.isatty(STDERR) else ''}{MESSAGE}\n".encode())


def _interrupt(number: int, frame: FrameType | None) -> None:
    while frame is not None:
        is_module = frame.f_code.co_name == "<module>"
        if is_module and frame.f_globals.get("__name__") != "__main__":
            print_interrupted()
            os._exit(EXIT_CODE)
        frame = frame.f_back
    raise KeyboardInterrupt
