"""The logger contract.

A logger sends metrics and sample images elsewhere: to event files, a server or a database. It is a subclass of
`Logger` in its own file, either in `runs/loggers/` or written by the user. Loggers are chosen with
`--loggers NAME,./my_logger.py`. The run's own record (metrics.jsonl, samples/) does not depend on them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt

from paceline.core.errors import UserError, missing
from paceline.core.installed import is_installed
from paceline.core.registry import load_class

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
