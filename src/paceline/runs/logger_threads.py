"""The loggers of a run, each in a thread with a bounded queue, so that a slow or failing one delays nothing."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from itertools import islice, takewhile
from pathlib import Path
from typing import NamedTuple, TypeAlias

from paceline.core.text import one_line, print_line
from paceline.core.watch import beat
from paceline.runs.logger import Logger, LogLine, Pixels, load_loggers

MAX_ENTRIES = 10_000
MAX_IMAGE_BYTES = 2**26  # maximum size of all waiting images
MAX_LINES_AT_ONCE = 100


class SampleImage(NamedTuple):
    """A sample image that waits for a logger."""

    name: str
    images: int  # number of images seen
    pixels: Pixels


@dataclass(frozen=True)
class Flush:
    """A request to store everything that was logged before it."""

    done: threading.Event = field(default_factory=threading.Event)


class End(NamedTuple):
    """The last entry of a run."""

    state: str
    weights: Path | None


Entry: TypeAlias = LogLine | SampleImage | Flush | End


class LoggerQueue:
    """A bounded queue for one logger. The logger's thread takes entries, and any thread may add them."""

    def __init__(self) -> None:
        self._waiting: deque[Entry] = deque()
        self._changed = threading.Condition()
        self._image_bytes = 0
        self._num_requests = 0  # number of waiting entries that are neither lines nor images
        self._is_closed = False
        self.dropped_lines = 0
        self.dropped_images = 0

    def add(self, entry: Entry) -> bool:
        """Add an entry; if there is no room for it, count it as dropped and return False."""
        with self._changed:
            if self._is_closed:
                _answer(entry)
                return True  # the logger is switched off, which has already been reported
            if self._is_full(entry):
                self.dropped_lines += isinstance(entry, LogLine)
                self.dropped_images += isinstance(entry, SampleImage)
                return False
            self._waiting.append(entry)
            self._count(entry, +1)
            self._changed.notify_all()
        return True

    def _is_full(self, entry: Entry) -> bool:
        if isinstance(entry, SampleImage) and self._image_bytes + entry.pixels.nbytes > MAX_IMAGE_BYTES:
            return True
        return isinstance(entry, (LogLine, SampleImage)) and len(self._waiting) >= MAX_ENTRIES

    def _count(self, entry: Entry, sign: int) -> None:
        if isinstance(entry, SampleImage):
            self._image_bytes += sign * entry.pixels.nbytes
        elif not isinstance(entry, LogLine):
            self._num_requests += sign

    def next(self) -> list[Entry]:
        """Wait for an entry and return it without removing it; consecutive lines are returned together."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting)
            if not isinstance(self._waiting[0], LogLine):
                return [self._waiting[0]]
            lines = takewhile(lambda entry: isinstance(entry, LogLine), self._waiting)
            return list(islice(lines, MAX_LINES_AT_ONCE))

    def remove(self, entries: list[Entry]) -> None:
        """Remove entries returned by `next`, after they have been delivered."""
        with self._changed:
            for entry in entries if not self._is_closed else ():
                self._waiting.popleft()
                self._count(entry, -1)
                _answer(entry)

    def pause(self, seconds: float) -> None:
        """Wait for the given time, or until a flush or the end of the run is requested."""
        with self._changed:
            self._changed.wait_for(lambda: self._num_requests > 0, seconds)

    def close(self) -> tuple[int, int]:
        """Discard all waiting entries; return the number of lines and of images among them."""
        with self._changed:
            self._is_closed = True
            for entry in self._waiting:
                _answer(entry)
            lines = sum(isinstance(entry, LogLine) for entry in self._waiting)
            images = sum(isinstance(entry, SampleImage) for entry in self._waiting)
            self._waiting.clear()
            return lines, images


def _answer(entry: Entry) -> None:
    if isinstance(entry, Flush):
        entry.done.set()


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


FLUSH_SECONDS = 2.0  # maximum delay of a checkpoint; a logger that hangs delays only one checkpoint
UNFINISHED_SECONDS = 10.0  # maximum wait at the end of a run that was stopped or failed


class LoggerGroup:
    """The loggers of one run. No call waits for a logger, except `flush` and `close`, which wait a limited time."""

    def __init__(self, setting: str, folder: Path, images: int) -> None:
        self._threads: list[LoggerThread] = []
        for name, logger_class in load_loggers(setting).items():
            try:
                # Imported in this thread: two threads that import modules of one package can see incomplete modules.
                if logger_class.package:
                    import_module(logger_class.package)
            except Exception as error:
                print_line(f"logger {name} is switched off: {one_line(error)}; training continues without it")
                continue
            self._threads.append(LoggerThread(name, logger_class, folder, images))

    def write(self, images: int, values: Mapping[str, float], at: float) -> None:
        """Queue a line of metrics, written at the Unix time `at`, for each logger."""
        line = LogLine(images, values, at)
        for thread in self._threads:
            thread.add(line)

    def image(self, name: str, images: int, pixels: Pixels) -> None:
        """Queue a sample image for each logger."""
        for thread in self._threads:
            thread.add(SampleImage(name, images, pixels))

    def flush(self) -> None:
        """Wait until the loggers have stored everything, for at most `FLUSH_SECONDS`."""
        until = time.monotonic() + FLUSH_SECONDS
        requests = [thread.request_flush() for thread in self._threads]
        for request in filter(None, requests):
            request.done.wait(max(0.0, until - time.monotonic()))

    def close(self, state: str, weights: Path | None, seconds: float) -> None:
        """Record the run's final state in each logger, and wait at most `seconds` for all of them; see `Logger.end`."""
        threads, self._threads = self._threads, []
        for thread in threads:
            thread.add(End(state, weights))
        until = time.monotonic() + (seconds if state == "finished" else min(seconds, UNFINISHED_SECONDS))
        for thread in threads:
            thread.join(until)
