"""The logger contract, and the group of loggers that a run uses.

A logger sends metrics and sample images elsewhere: to event files, a server or a database. It is a subclass of
`Logger` in its own file, either in `runs/loggers/` or written by the user. Loggers are chosen with
`--loggers NAME,./my_logger.py`. The run's own record (metrics.jsonl, samples/) does not depend on them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt

from paceline.core.printable import print_line
from paceline.core.registry import load_class
from paceline.core.secrets import one_line

Pixels = npt.NDArray[np.uint8]


class Logger:
    """Receives metrics and sample images. Subclass it in a separate file.

    The file name is the name of the logger. Only rank 0 of a run has loggers. Implement `write` and, for sample images,
    `image`. If a logger raises an exception, the run reports it once and stops using the logger; training continues.
    `flush` may be called from another thread. Import large packages in `__init__`, not at the top of the file.

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

    def __init__(self, folder: Path, images: int) -> None:
        """Open the log of the run in `folder`, which already exists.

        A resumed run has already seen `images` images. Drop any entries after that point.
        """

    def write(self, images: int, values: Mapping[str, float]) -> None:
        """Log values, named `group/name`, after `images` images have been seen.

        A value may be NaN or infinite.
        """
        raise NotImplementedError

    def image(self, name: str, images: int, pixels: Pixels) -> None:
        """Log a sample image.

        `pixels` is a uint8 [height, width, channels] array with 1 or 3 channels.
        """

    def flush(self) -> None:
        """Wait until all entries are stored; called before a checkpoint is written."""

    def close(self) -> None:
        """Close the log; no other method is called afterwards."""


def logger_names(setting: str) -> list[str]:
    """Return the names and paths listed in `--loggers`."""
    return list(dict.fromkeys(name.strip() for name in setting.split(",") if name.strip()))


def check_loggers(setting: str) -> None:
    """Raise UserError if `--loggers` contains an unknown or broken logger."""
    for name in logger_names(setting):
        load_class("logger", name, Logger)


class LoggerGroup:
    """The loggers of one run. A logger that raises an exception is reported and switched off."""

    def __init__(self, setting: str, folder: Path, images: int) -> None:
        self._open: dict[str, Logger] = {}
        for name in logger_names(setting):
            logger_class = load_class("logger", name, Logger)
            try:
                self._open[name] = logger_class(folder, images)
            except Exception as error:
                _report(name, error)

    def write(self, images: int, values: Mapping[str, float]) -> None:
        """Pass values to each logger."""
        self._each(lambda logger: logger.write(images, values))

    def image(self, name: str, images: int, pixels: Pixels) -> None:
        """Pass a sample image to each logger."""
        self._each(lambda logger: logger.image(name, images, pixels))

    def flush(self) -> None:
        """Flush each logger."""
        self._each(lambda logger: logger.flush())

    def close(self) -> None:
        """Close each logger."""
        self._each(lambda logger: logger.close())
        self._open.clear()

    def _each(self, call: Callable[[Logger], None]) -> None:
        for name, logger in list(self._open.items()):
            try:
                call(logger)
            except Exception as error:
                if self._open.pop(name, None):  # otherwise, the saver thread has already reported the error
                    _report(name, error)


def _report(name: str, error: Exception) -> None:
    print_line(f"logger {name} is switched off: {one_line(error)}; training continues without it")
