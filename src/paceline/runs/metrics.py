"""A run's metrics.jsonl and its sample images as PNG files, written in the background."""

from __future__ import annotations

import json
import math
import os
import re
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from threading import Semaphore
from typing import TypeAlias, cast

import numpy as np
from PIL import Image

from paceline.core.background import Background
from paceline.core.errors import UserError
from paceline.core.files import open_append, read_bounded, remove_leftovers, replacing, sync_open, why, write_file
from paceline.core.types import JsonObject
from paceline.runs.logger import LoggerGroup, LogLine, Pixels, SampleImage

METRICS = "metrics.jsonl"
SAMPLES = "samples"
REAL_IMAGES = "real"  # name of the training images that are saved alongside generated ones
SAMPLE_NAME = re.compile(r"(.+)-(\d{12})\.png")
MAX_WAITING_IMAGES = 4  # sample images that wait to be written; the next one waits for room
MAX_METRICS_BYTES = 2**32
MAX_LINE_BYTES = 2**20  # a longer line counts as broken
EVALUATION_SECONDS = "time/evaluation_seconds"  # logged only for evaluations during training
TRAINING_SECONDS = "time/training_seconds"  # the time from which the speed of a log interval is computed
RANK_SECONDS = "ranks/seconds_"  # each rank's own work per step in seconds; the rank follows
STRAGGLER_RANK, STRAGGLER_SLOWDOWN = "ranks/straggler", "ranks/slowdown"  # the slow rank, and how much it delays steps
NO_STRAGGLER = -1.0  # logged as the rank
_OWN_NAMES = {"images", "seconds", "time"}
_NUMBERS = {int, float, type(None)}

MetricsLine: TypeAlias = dict[str, float | None]  # "images" is always an int; None stands for NaN or infinity


class MetricsWriter:
    """Writes a run's metrics and sample images and passes them to its loggers; used only on rank 0."""

    def __init__(self, folder: Path, images: int = 0, loggers: str = "", *, evaluated: bool = True) -> None:
        """Remove metrics and samples logged after `images` images, and append new ones; 0 removes everything.

        `loggers` is the value of the `--loggers` setting. `evaluated` is False if the checkpoint at `images` was saved
        before its evaluation. The metrics of that evaluation are then removed too, because they will be written again.
        """
        folder.mkdir(parents=True, exist_ok=True)
        self.note = _describe_lost_lines(folder, images)  # to be printed; empty if no line before `images` is lost
        kept = _cut_metrics(folder / METRICS, images, evaluated)
        _cut_samples(folder / SAMPLES, images)
        self._samples = folder / SAMPLES
        # Unbuffered, so each line is a single write: readers never see a partial line, and a kill loses no lines.
        self._file = os.fdopen(open_append(folder / METRICS), "ab", buffering=0)
        self._seconds_before = float(kept[-1].get("seconds") or 0.0) if kept else 0.0
        self._started = time.perf_counter()
        self._loggers = LoggerGroup(loggers, folder, images)
        self._background, self._room = Background("sample images"), Semaphore(MAX_WAITING_IMAGES)

    @property
    def seconds(self) -> float:
        """Training time so far in seconds, including the time before the run was resumed."""
        return self._seconds_before + time.perf_counter() - self._started

    def write(self, images: int, values: Mapping[str, float]) -> None:
        """Append one line of metric values; `images` is the number of images seen so far."""
        assert not _OWN_NAMES & values.keys(), f"{_OWN_NAMES & values.keys()} are reserved names"
        numbers = {name: float(value) for name, value in values.items()}
        now = round(time.time(), 3)
        line: MetricsLine = {
            "images": images,
            "seconds": round(self.seconds, 3),
            "time": now,
            **{name: number if math.isfinite(number) else None for name, number in numbers.items()},
        }
        self._file.write(json.dumps(line, allow_nan=False).encode() + b"\n")
        logged = LogLine(images, numbers, now)
        if self._background.is_running:  # loggers receive lines and images in order, and an image may be waiting
            self._background.add(partial(self._loggers.add, logged))
        else:
            self._loggers.add(logged)

    def image(self, name: str, images: int, arrange: Callable[[], Pixels]) -> None:
        """Write a sample image to samples/NAME-IMAGES.png in a thread.

        `arrange` is called in the thread and returns the image as a uint8 [height, width, channels] array. An error in
        the thread is raised by the next call of any method except `close`.
        """
        assert "/" not in name, name
        self._background.check()
        self._room.acquire()
        self._background.add(partial(self._write_image, name, images, arrange))

    def _write_image(self, name: str, images: int, arrange: Callable[[], Pixels]) -> None:
        try:
            pixels = arrange()
            assert pixels.dtype == np.uint8 and pixels.ndim == 3, f"{pixels.dtype} {pixels.shape}"
            self._samples.mkdir(exist_ok=True)
            with replacing(self._samples / f"{name}-{images:012}.png", durable=False) as temporary:
                Image.fromarray(pixels[..., 0] if pixels.shape[-1] == 1 else pixels).save(temporary, format="png")
            self._loggers.add(SampleImage(name, images, pixels))
        finally:
            self._room.release()

    def wait_for_images(self) -> None:
        """Wait until all sample images are written."""
        self._background.wait()

    def flush(self) -> None:
        """Flush everything to disk, so that no checkpoint is newer than its metrics and sample images."""
        self.wait_for_images()
        sync_open(self._file.fileno())
        self._loggers.flush()

    def close(self, state: str = "finished", weights: Path | None = None, logger_wait: float = math.inf) -> None:
        """Close the file and the loggers, which get at most `logger_wait` seconds; a second call has no effect.

        Sample images that are still waiting are written first, within the same time.

        The loggers record the run's final state and the file with its trained weights; see `Logger.end`.
        """
        end = time.monotonic() + logger_wait
        self._background.close(logger_wait)
        self._file.close()
        self._loggers.close(state, weights, max(0.0, end - time.monotonic()))


def read_metrics(folder: Path) -> list[MetricsLine]:
    """Return the lines of a run's metrics, skipping broken ones."""
    return [row for row in read_rows(folder) if row is not None]


def read_rows(folder: Path) -> list[MetricsLine | None]:
    """Return every line of a run's metrics; None for a broken line."""
    rows = map(parse_line, read_metrics_file(folder).splitlines())
    return [cast(MetricsLine, row) if row and set(map(type, row.values())) <= _NUMBERS else None for row in rows]


def read_metrics_file(folder: Path) -> bytes:
    """Return the content of a run's metrics.jsonl, empty if there is none; raise UserError if it is not a file."""
    try:
        return read_bounded(folder / METRICS, MAX_METRICS_BYTES)
    except FileNotFoundError:
        return b""
    except OSError as error:
        raise UserError(f"{folder / METRICS}: cannot be read ({why(error)}); repair or remove it") from None


def parse_line(line: bytes) -> JsonObject | None:
    """Return one line's values by name, or None if the line is broken.

    Values can have any JSON type, because another program may have written the file.
    """
    if len(line) > MAX_LINE_BYTES:
        return None
    try:
        row = json.loads(line, parse_constant=reject_constant)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) and type(row.get("images")) is int else None


def reject_constant(constant: str) -> None:
    """Raise ValueError for NaN and infinity, which are not valid JSON; used as `parse_constant` of `json.loads`."""
    raise ValueError(f"{constant} is not valid JSON")


def _cut_metrics(path: Path, images: int, evaluated: bool) -> list[MetricsLine]:
    """Remove broken lines and lines written after the checkpoint at `images`; return the remaining lines."""
    if not path.exists():
        return []

    def is_kept(row: MetricsLine) -> bool:
        seen = row["images"] or 0
        # Without a checkpoint the run starts over and writes the line at 0 images again.
        return images > 0 and (seen < images or (seen == images and (evaluated or EVALUATION_SECONDS not in row)))

    kept = [row for row in read_metrics(path.parent) if is_kept(row)]
    content = b"".join(json.dumps(row).encode() + b"\n" for row in kept)
    if content != read_metrics_file(path.parent):
        write_file(path, content)
    return kept


def _describe_lost_lines(folder: Path, images: int) -> str:
    """Return a note if lines written up to the checkpoint at `images` are damaged or missing; else, an empty string.

    Each checkpoint is saved after a line for the same number of images. A kill can damage only the last line, which has
    no end then.
    """
    lines = read_metrics_file(folder).split(b"\n")[:-1] if images else []
    rows = list(map(parse_line, lines))
    broken = rows.count(None)
    if not images or (not broken and any(row and row["images"] == images for row in rows)):
        return ""
    what = f"{broken:,} lines cannot be read" if broken else "its end is missing"
    return f"{folder / METRICS}: some metrics from before {images:,} images are lost ({what})"


def _cut_samples(folder: Path, images: int) -> None:
    remove_leftovers(folder)
    for path in folder.glob("*"):
        sample = SAMPLE_NAME.fullmatch(path.name)
        if sample and (int(sample[2]) > images or images == 0):
            path.unlink()
