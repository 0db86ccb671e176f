"""The loggers of one run, each in its own thread."""

from __future__ import annotations

import time
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path

from paceline.core.printable import print_line
from paceline.core.secrets import one_line
from paceline.runs.logger import LogLine, Pixels, load_loggers
from paceline.runs.logger_queue import End, SampleImage
from paceline.runs.logger_thread import LoggerThread

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
