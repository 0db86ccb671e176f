"""The logger contract, the file loggers.json with the IDs of a run in each logger, and the loggers' threads."""

from __future__ import annotations

import math
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from queue import Queue
from typing import ClassVar, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from paceline.config.resolve import flatten
from paceline.core.errors import UserError, missing
from paceline.core.files import read_json, write_json
from paceline.core.registry import is_installed, load_class
from paceline.core.text import one_line, print_line, redact
from paceline.core.types import SettingValue
from paceline.core.watch import beat
from paceline.runs.record import read_record

Pixels = npt.NDArray[np.uint8]


class LogLine(NamedTuple):
    """One line of metrics."""

    images: int  # number of images seen
    values: Mapping[str, float]  # values by `group/name`; a value may be NaN or infinite
    time: float  # Unix time


class Logger:
    """Receives metrics and sample images. Subclass it in a separate file.

    The file name is the name of the logger. Only rank 0 of a run has loggers. Implement `write` and, for sample images,
    `image`. All methods, including `__init__`, are called in a thread that belongs to the logger, so a slow logger does
    not delay training. Entries that do not fit into the logger's queue are dropped and counted. If a logger raises an
    exception, the run reports it once and stops using the logger; training continues. Import large packages in
    `__init__`, not at the top of the file, and name the package in `package`, so that it is imported before training.

    Examples:
        ```python
        # lines.py
        from paceline import Logger


        class Lines(Logger):
            def __init__(self, folder, images):
                self.file = (folder / "lines.txt").open("a")

            def write(self, images, values):
                for name, value in values.items():
                    print(f"{images:,} {name} {value:.4g}", file=self.file)

            def close(self):
                self.file.close()
        ```

        >>> result = paceline.train("./my_recipe.py", loggers="./lines.py", images=512, out="runs/logged")
        >>> "test/top1" in (result.folder / "lines.txt").read_text()
        True
    """

    package: ClassVar[str] = ""  # a package that the logger needs, e.g. "wandb"
    extra: ClassVar[str] = ""  # Paceline's extra that installs the package, if there is one

    class Unreachable(Exception):
        """Raised by a method of a logger whose server does not answer; the method is called again later."""

    def __init__(self, folder: Path, images: int) -> None:
        """Open the log of the run in `folder`, which already exists.

        A resumed run has already seen `images` images. Drop any entries after that point.
        """

    def connect(self) -> None:
        """Connect to the logger's server.

        Called before all methods below, and again after it raised `Unreachable`.
        """

    def write(self, images: int, values: Mapping[str, float]) -> None:
        """Log values, named `group/name`, after `images` images have been seen.

        A value may be NaN or infinite.
        """
        raise NotImplementedError

    def write_lines(self, lines: Sequence[LogLine]) -> None:
        """Log several lines of metrics.

        Override this method if the logger can send several lines in one request.
        """
        for line in lines:
            self.write(line.images, line.values)

    def image(self, name: str, images: int, pixels: Pixels) -> None:
        """Log a sample image.

        `pixels` is a uint8 [height, width, channels] array with 1 or 3 channels.
        """

    def flush(self) -> None:
        """Wait until all entries are stored; called before a checkpoint is written."""

    def end(self, state: str, weights: Path | None) -> None:
        """Record the run's final state: "finished", "stopped" or "failed".

        `weights` is the file with the trained weights of the best checkpoint, or None if there is no checkpoint.
        """

    def close(self) -> None:
        """Close the log; no other method is called afterwards."""


def load_loggers(setting: str) -> dict[str, type[Logger]]:
    """Return the classes of the loggers in `--loggers` by name; raise UserError if one is unknown or broken."""
    names = filter(None, map(str.strip, setting.split(",")))
    return {name: load_class("logger", name, Logger) for name in dict.fromkeys(names)}


def check_loggers(setting: str) -> None:
    """Raise UserError if `--loggers` contains an unknown or broken logger, or one whose package is missing."""
    for name, logger in load_loggers(setting).items():
        if not is_installed(logger.package):
            raise UserError(f"--loggers {name}: {missing(logger.package, logger.extra)}")


LOGGER_RUNS = "loggers.json"
_writing = threading.Lock()  # several loggers may write the file at the same time
_ID = re.compile(r"[A-Za-z0-9_-]{1,128}")


def read_run_id(folder: Path, logger: str, service: str = "") -> str:
    """Return the ID of this run in a logger's service; empty if there is none, or if the service is a different one."""
    entry = read_json(folder / LOGGER_RUNS).get(logger)
    if not isinstance(entry, dict) or entry.get("service") != redact(service):
        return ""
    found = entry.get("id")
    return found if isinstance(found, str) and _ID.fullmatch(found) else ""


def write_run_id(folder: Path, logger: str, run_id: str, service: str = "") -> None:
    """Store the ID of this run in a logger's service; `service` is its address, stored without credentials."""
    with _writing:
        kept = dict(read_json(folder / LOGGER_RUNS))
        write_json(folder / LOGGER_RUNS, {**kept, logger: {"id": run_id, "service": redact(service)}}, indent=1)


def describe_run(folder: Path) -> dict[str, SettingValue]:
    """Return a run's recipe, settings, versions and hardware by name, without credentials; empty before it starts."""
    record = read_record(folder)
    if record is None:
        return {}
    provenance = {f"provenance.{name}": text for name, text in record.provenance.versions_and_hardware.items()}
    found = {"recipe": record.recipe, **flatten(record.settings), **provenance}
    return {name: redact(value) if isinstance(value, str) else value for name, value in found.items()}


MAX_LINES_AT_ONCE = 100


class SampleImage(NamedTuple):
    """A sample image that waits for a logger."""

    name: str
    images: int  # number of images seen
    pixels: Pixels


class End(NamedTuple):
    """The last entry of a run."""

    state: str
    weights: Path | None


Entry: TypeAlias = LogLine | SampleImage | threading.Event | End  # the event is set when everything before is stored
MAX_WAITING: dict[type, int] = {LogLine: 10_000, SampleImage: 16}  # entries; further ones are dropped

FIRST_RETRY_SECONDS = 1.0
MAX_RETRY_SECONDS = 30.0
SILENT_SECONDS = 2.0  # a longer wait at the end of a run is announced
SLICE_SECONDS = 0.25  # how often a waiting thread signals that it is alive


class LoggerThread:
    """Opens a logger in a new thread with a bounded queue, so that a slow or failing logger delays nothing."""

    def __init__(self, name: str, logger_class: type[Logger], folder: Path, images: int) -> None:
        self.name = name
        self._queue: Queue[Entry] = Queue()
        self._flushed: threading.Event | None = None  # the last request
        self._queued, self._delivered, self._dropped = Counter[type](), Counter[type](), Counter[type]()
        self._is_off = False  # whether the logger has failed
        self._given_up = threading.Event()
        self._thread = threading.Thread(
            target=self._run, args=(partial(logger_class, folder, images),), name=f"logger {name}", daemon=True
        )
        self._thread.start()

    def add(self, entry: Entry) -> None:
        """Queue an entry without waiting; drop a line or an image if there is no room for it."""
        kind = type(entry)
        if self._queued[kind] - self._delivered[kind] < MAX_WAITING.get(kind, math.inf):
            self._queued[kind] += 1
            self._queue.put(entry)
            return
        if not self._dropped and not self._is_off:
            self._report("is too slow: its queue is full, so entries are dropped; the run folder contains all of them")
        self._dropped[kind] += 1

    def request_flush(self) -> threading.Event | None:
        """Request a flush; return None if the last flush is not finished, so that no caller waits for it again."""
        if self._is_off or (self._flushed and not self._flushed.is_set()):
            return None
        self._flushed = threading.Event()
        self.add(self._flushed)
        return None if self._is_off else self._flushed

    def join(self, until: float) -> None:
        """Wait until the last entry is delivered, at most until the given time; then report what was lost."""
        announce_at = time.monotonic() + SILENT_SECONDS
        while self._thread.is_alive() and (left := until - time.monotonic()) > 0:
            self._thread.join(min(left, SLICE_SECONDS))
            beat()
            if time.monotonic() > announce_at and self._thread.is_alive():
                announce_at = math.inf
                self._report(f"is still sending; waiting up to {max(0.0, until - time.monotonic()):.0f} s")
        self._given_up.set()
        if self._thread.is_alive():
            self._report("did not finish in time; its log may be incomplete, but the run folder contains everything")
        elif self._is_off:
            return
        lost = self._dropped + (self._queued - self._delivered)
        if lost[LogLine] or lost[SampleImage]:
            self._report(f"dropped {_count(lost[LogLine], 'line')} and {_count(lost[SampleImage], 'image')}")

    def _run(self, open_logger: Callable[[], Logger]) -> None:
        try:
            logger = open_logger()
            if self._repeat(logger.connect):
                for entries in self._batches():
                    if not self._repeat(partial(_deliver, logger, entries)):
                        return
                    self._delivered.update(map(type, entries))
        except Exception as error:
            self._is_off = True
            if self._flushed:
                self._flushed.set()
            if not self._given_up.is_set():
                self._report(f"is switched off: {one_line(error)}; training continues without it")

    def _batches(self) -> Iterator[list[Entry]]:
        """Yield the entries in order, up to the end of the run; lines that are waiting are yielded together."""
        lines: list[Entry] = []
        entry: Entry | None = None
        while not isinstance(entry, End):
            entry = self._queue.get()
            if isinstance(entry, LogLine):
                lines.append(entry)
                if len(lines) < MAX_LINES_AT_ONCE and not self._queue.empty():
                    continue
            if lines:
                yield lines
                lines = []
            if not isinstance(entry, LogLine):
                yield [entry]

    def _repeat(self, call: Callable[[], None]) -> bool:
        """Call a function, with growing pauses while the server does not answer; return False if it was given up."""
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
                return True
        return False

    def _report(self, text: str) -> None:
        print_line(f"logger {self.name} {text}")


def _deliver(logger: Logger, entries: list[Entry]) -> None:
    """Pass entries to a logger. A list with several entries contains only lines."""
    match entries[0]:
        case LogLine():
            logger.write_lines([entry for entry in entries if isinstance(entry, LogLine)])
        case SampleImage(name, images, pixels):
            logger.image(name, images, pixels)
        case End(state, weights):
            logger.end(state, weights)
            logger.close()
        case flushed:
            logger.flush()
            flushed.set()


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

    def add(self, entry: LogLine | SampleImage) -> None:
        """Queue a line of metrics or a sample image for each logger."""
        for thread in self._threads:
            thread.add(entry)

    def flush(self) -> None:
        """Wait until the loggers have stored everything, for at most `FLUSH_SECONDS`."""
        until = time.monotonic() + FLUSH_SECONDS
        requests = [thread.request_flush() for thread in self._threads]
        for request in filter(None, requests):
            request.wait(max(0.0, until - time.monotonic()))

    def close(self, state: str, weights: Path | None, seconds: float) -> None:
        """Record the run's final state in each logger, and wait at most `seconds` for all of them; see `Logger.end`."""
        threads, self._threads = self._threads, []
        for thread in threads:
            thread.add(End(state, weights))
        until = time.monotonic() + (seconds if state == "finished" else min(seconds, UNFINISHED_SECONDS))
        for thread in threads:
            thread.join(until)
