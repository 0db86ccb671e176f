"""Stop requests: the run finishes its step, saves and exits. Running the same command again resumes it."""

from __future__ import annotations

import math
import os
import signal
import stat
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import FrameType

import torch

from paceline.core.errors import UserError
from paceline.core.text import print_line
from paceline.core.watch import has_failed_peer
from paceline.parallel.world import World

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
SECOND_REQUEST_AFTER_SECONDS = 1.0  # a signal that arrives sooner is the same Ctrl-C, forwarded by a launcher
SECONDS_BETWEEN_CHECKS = 2.0
PATIENCE_SECONDS = 7.0  # how long a stopping run may make no progress; torch waits 5 s for a loader process that hangs

# Exit codes of a run that stopped on request and saved a checkpoint.
INTERRUPTED = 130  # stopped by Ctrl-C, as in shells
RESUME_LATER = 75  # stopped by another signal (EX_TEMPFAIL)

MIRROR_INCOMPLETE = 74  # exit code of a run that finished, but whose mirror is not complete (EX_IOERR)


@contextmanager
def handling_stop_signals(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Handle the signals that stop a run: `SIGNALS`, except SIGHUP if this process ignores it because of `nohup`.

    Only the main thread can do so; in other threads, the context does nothing.
    """
    here = threading.current_thread() is threading.main_thread()
    ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    numbers = [number for number in SIGNALS if here and not (ignored and number == signal.SIGHUP)]
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)


def leave_terminal() -> None:
    """Discard further output to a closed terminal, because every write would fail."""
    for stream in (1, 2):
        if stat.S_ISCHR(os.fstat(stream).st_mode):  # `isatty` returns False for a closed terminal
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, stream)
            os.close(nowhere)


def repeat_signal(code: int) -> None:
    """Send this process the signal that stopped its worker processes, if that is what their exit code means."""
    if code - 128 in SIGNALS:
        signal.raise_signal(code - 128)


class DataWaitEnded(BaseException):
    """Raised by a stop request in a main thread that waits for data. No error handler of the data may catch it."""


DATA_WAIT_ENDED = DataWaitEnded()  # keeps torch's iterator, which would first wait 10 s for a loader that hangs


class StopRequest:
    """A request to stop, made by Ctrl-C, SIGTERM, SIGUSR1 or SIGHUP. A second Ctrl-C stops immediately.

    If `announces` is true, the first signal prints a line, so that the user knows that the run is about to stop.
    """

    def __init__(self, announces: bool = False) -> None:
        self.announces = announces
        self.signal: int = 0
        self._since = 0.0
        self._failure = ""
        self.patience_after: Callable[[], float] = lambda: PATIENCE_SECONDS
        self._ends_data_wait = False

    def listening(self) -> AbstractContextManager[None]:
        """Return a context in which this request handles the signals."""
        return handling_stop_signals(self._handle)

    @contextmanager
    def ending_data_wait(self) -> Iterator[None]:
        """Raise DataWaitEnded in the main thread if a stop is requested inside the context."""
        try:
            self._ends_data_wait = True
            yield
        finally:
            self._ends_data_wait = False

    def fail(self, reason: str) -> None:
        """Raise UserError in the main thread when that thread next runs Python code; do nothing outside `listening`."""
        main = threading.main_thread().ident
        if main is not None and signal.getsignal(signal.SIGINT) == self._handle:
            self._failure = reason
            signal.pthread_kill(main, signal.SIGINT)  # also interrupts a waiting system call

    def patience(self) -> float:
        """Return for how many seconds the run may make no progress: infinite before a stop request."""
        return self.patience_after() if self.signal else math.inf

    def has_arrived(self) -> bool:
        """Return whether this process has received a stop request."""
        return bool(self.signal)

    @property
    def exit_code(self) -> int:
        """The exit code of a stopped run; RESUME_LATER if only another rank received the signal."""
        return INTERRUPTED if self.signal == signal.SIGINT else RESUME_LATER

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._failure:
            raise UserError(self._failure)
        if number == signal.SIGHUP:
            leave_terminal()
        if number == signal.SIGINT and self.signal and time.monotonic() - self._since > SECOND_REQUEST_AFTER_SECONDS:
            raise KeyboardInterrupt
        if not self.signal:
            self.signal, self._since = number, time.monotonic()
            if self.announces:
                # Print in a thread: this handler may have interrupted the owner of the stream's lock.
                threading.Thread(target=_answer, args=[number], daemon=True).start()
            if self._ends_data_wait:
                raise DATA_WAIT_ENDED


def _answer(number: int) -> None:
    if number == signal.SIGTERM and has_failed_peer():
        return  # the launcher ends this process because another one failed, so there will be no checkpoint
    print_line(_answer_to(number))


def _answer_to(number: int) -> str:
    if number == signal.SIGINT:
        return "saving a checkpoint after this step; press Ctrl-C again to stop now, without saving"
    return f"received {signal.Signals(number).name}: saving a checkpoint after this step"


class StopVote:
    """Whether any rank has received a stop request. Ranks check together every few seconds, so steps stay fast."""

    def __init__(self, world: World, request: StopRequest) -> None:
        self.world, self.request = world, request
        self._steps, self._check_after, self._since = 0, 1, time.monotonic()

    def __call__(self) -> bool:
        """Return whether to stop, with the same answer on every rank; all ranks call this after every step."""
        if self.world.size == 1:
            return self.request.has_arrived()
        self._steps += 1
        if self._steps < self._check_after:
            return False
        now = time.monotonic()
        own = torch.tensor([bool(self.request.signal), now - self._since], dtype=torch.float64)
        requested, seconds = self.world.gather(own.to(self.world.device)).cpu().unbind(1)
        num_steps = int(SECONDS_BETWEEN_CHECKS * self._steps / max(seconds.max().item(), 1e-3))
        self._check_after = max(1, min(2 * self._check_after, num_steps))
        self._steps, self._since = 0, now
        return bool(requested.any())
