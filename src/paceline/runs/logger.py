"""The logger contract, and the file loggers.json with the IDs of a run in each logger."""

from __future__ import annotations

import re
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt

from paceline.config.resolve import flatten
from paceline.core.errors import UserError, missing
from paceline.core.files import read_json, write_json
from paceline.core.registry import is_installed, load_class
from paceline.core.text import redact
from paceline.core.types import SettingValue
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


def logger_names(setting: str) -> list[str]:
    """Return the names and paths listed in `--loggers`."""
    return list(dict.fromkeys(name.strip() for name in setting.split(",") if name.strip()))


def load_loggers(setting: str) -> dict[str, type[Logger]]:
    """Return the classes of the loggers in `--loggers`; raise UserError if one is unknown or broken."""
    return {name: load_class("logger", name, Logger) for name in logger_names(setting)}


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
