"""A logger in its own thread, so that a slow, hanging or failing logger neither stops nor delays training."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from paceline.core.heartbeat import beat
from paceline.core.printable import print_line
from paceline.core.secrets import one_line
from paceline.runs.logger import Logger, LogLine
from paceline.runs.logger_queue import End, Entry, Flush, LoggerQueue, SampleImage

PAUSE_SECONDS = 1.0  # lines that arrive during this pause are delivered together
FIRST_RETRY_SECONDS = 1.0
MAX_RETRY_SECONDS = 30.0
SILENT_SECONDS = 2.0  # a longer wait at the end of a run is announced
SLICE_SECONDS = 0.25  # how often a waiting thread signals that it is alive


class LoggerThread:
    """Opens a logger in a new thread and delivers the entries of the logger's queue."""

    def __init__(self, name: str, logger_class: type[Logger], folder: Path, images: int) -> None:
        self.name = name
        self._queue = LoggerQueue()
        self._flush: Flush | None = None  # the last request
        self._is_full = False  # whether it has been reported that entries are dropped
        self._given_up = threading.Event()
        self._thread = threading.Thread(
            target=self._run, args=(partial(logger_class, folder, images),), name=f"logger {name}", daemon=True
        )
        self._thread.start()

    def add(self, entry: Entry) -> None:
        """Queue an entry without waiting; drop it if the queue is full."""
        if not self._queue.add(entry) and not self._is_full:
            self._is_full = True
            self._report("is too slow: its queue is full, so entries are dropped; the run folder contains all of them")

    def request_flush(self) -> Flush | None:
        """Request a flush; return None if the last flush is not finished, so that no caller waits for it again."""
        if self._flush and not self._flush.done.is_set():
            return None
        self._flush = Flush()
        self.add(self._flush)
        return self._flush

    def join(self, until: float) -> None:
        """Wait until the last entry is delivered, at most until the given time; then report what was lost."""
        began = time.monotonic()
        announced = False
        while self._thread.is_alive() and (left := until - time.monotonic()) > 0:
            self._thread.join(min(left, SLICE_SECONDS))
            beat()
            if not announced and time.monotonic() - began > SILENT_SECONDS and self._thread.is_alive():
                announced = True
                self._report(f"is still sending; waiting up to {max(0.0, until - time.monotonic()):.0f} s")
        self._given_up.set()
        unsent_lines, unsent_images = self._queue.close()
        if self._thread.is_alive():
            self._report("did not finish in time; its log may be incomplete, but the run folder contains everything")
        lines, images = unsent_lines + self._queue.dropped_lines, unsent_images + self._queue.dropped_images
        if lines or images:
            self._report(f"dropped {_count(lines, 'line')} and {_count(images, 'image')}")

    def _run(self, open_logger: Callable[[], Logger]) -> None:
        try:
            logger = open_logger()
            self._repeat(logger.connect)
            ended = False
            while not ended:
                entries = self._queue.next()
                self._repeat(partial(_deliver, logger, entries))
                self._queue.remove(entries)
                ended = isinstance(entries[0], End)
                self._queue.pause(0.0 if ended else PAUSE_SECONDS)
        except _GivenUp:
            pass
        except Exception as error:
            self._queue.close()
            if not self._given_up.is_set():
                self._report(f"is switched off: {one_line(error)}; training continues without it")

    def _repeat(self, call: Callable[[], None]) -> None:
        """Call a function; repeat the call, with growing pauses, for as long as the server does not answer."""
        pause = FIRST_RETRY_SECONDS
        while not self._given_up.is_set():
            try:
                call()
            except Logger.Unreachable as error:
                if pause == FIRST_RETRY_SECONDS:
                    self._report(f"cannot be reached: {one_line(error)}; retrying while training continues")
                self._given_up.wait(pause)
                pause = min(2 * pause, MAX_RETRY_SECONDS)
            else:
                if pause > FIRST_RETRY_SECONDS:
                    self._report("can be reached again")
                return
        raise _GivenUp

    def _report(self, text: str) -> None:
        print_line(f"logger {self.name} {text}")


class _GivenUp(Exception):
    """Ends the thread of a logger that did not finish in time."""


def _deliver(logger: Logger, entries: list[Entry]) -> None:
    """Pass entries to a logger. A list with several entries contains only lines."""
    lines = [entry for entry in entries if isinstance(entry, LogLine)]
    if lines:
        logger.write_lines(lines)
    for entry in entries:
        if isinstance(entry, SampleImage):
            logger.image(*entry)
        elif isinstance(entry, Flush):
            logger.flush()
        elif isinstance(entry, End):
            logger.end(entry.state, entry.weights)
            logger.close()


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" + ("" if number == 1 else "s")
