"""The entries that wait for a logger. The queue is bounded, and adding an entry never waits."""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass, field
from itertools import islice, takewhile
from pathlib import Path
from typing import NamedTuple, TypeAlias

from paceline.runs.logger import LogLine, Pixels

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
