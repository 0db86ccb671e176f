"""The run's numbers and pictures: metrics.jsonl, the same as TensorBoard events, and samples as PNG.

A line of metrics.jsonl is `{"images": …, "seconds": …, "time": …, "group/name": …}`: the images seen, the
seconds trained over all resumes, the Unix time, and the values. JSON has no NaN and no infinity: a value
that is not finite is written as null (TensorBoard's events keep it as it was).
"""

from __future__ import annotations

import json
import math
import os
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

METRICS = "metrics.jsonl"
SAMPLES = "samples"
TENSORBOARD = "tensorboard"
_OWN_NAMES = {"images", "seconds", "time"}
_PARTIAL = ".partial"  # ends the name of a file that is still being written
SAMPLE_NAME = re.compile(r"(.+)-(\d{12})\.png")


class MetricsWriter:
    """Writes a run's metrics and sample pictures; only rank 0 makes one."""

    def __init__(self, folder: Path, images: int = 0) -> None:
        """Cuts what the folder holds back to `images` seen, and appends from there; 0 starts afresh."""
        folder.mkdir(parents=True, exist_ok=True)
        kept = _cut_metrics(folder / METRICS, images)
        _cut_samples(folder / SAMPLES, images)
        self._samples = folder / SAMPLES
        # Unbuffered, so that a line is one write: who reads along never sees half of it, and a kill loses none.
        self._file = (folder / METRICS).open("ab", buffering=0)
        self._seconds_before = float(kept[-1].get("seconds") or 0.0) if kept else 0.0
        self._started = time.perf_counter()
        self._events = _event_writer(folder / TENSORBOARD, images)

    @property
    def seconds(self) -> float:
        """The seconds of training so far, over all resumes."""
        return self._seconds_before + time.perf_counter() - self._started

    def write(self, images: int, values: Mapping[str, float]) -> None:
        """Adds one line of values at this number of images seen."""
        assert not _OWN_NAMES & values.keys(), f"{_OWN_NAMES & values.keys()} are the line's own"
        numbers = {name: float(value) for name, value in values.items()}
        line: dict[str, float | None] = {
            "images": images,
            "seconds": round(self.seconds, 3),
            "time": round(time.time(), 3),
            **{name: number if math.isfinite(number) else None for name, number in numbers.items()},
        }
        self._file.write(json.dumps(line, allow_nan=False).encode() + b"\n")
        for name, number in numbers.items():
            self._events.add_scalar(name, number, images)

    def picture(self, name: str, images: int, picture: np.ndarray) -> None:
        """Adds a sample picture, uint8 [height, width, channels], as samples/NAME-IMAGES.png."""
        assert picture.dtype == np.uint8 and picture.ndim == 3, f"{picture.dtype} {picture.shape}"
        assert "/" not in name, name
        self._samples.mkdir(exist_ok=True)
        path = self._samples / f"{name}-{images:012}.png"
        beside = path.with_name(path.name + _PARTIAL)
        Image.fromarray(picture[..., 0] if picture.shape[-1] == 1 else picture).save(beside, format="png")
        beside.replace(path)
        self._events.add_image(f"{SAMPLES}/{name}", picture, images, dataformats="HWC")

    def flush(self) -> None:
        """Puts all that was written on the disk; a checkpoint that follows then never outruns its metrics."""
        os.fsync(self._file.fileno())
        self._events.flush()

    def close(self) -> None:
        """Ends the files."""
        self._file.close()
        self._events.close()


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """The lines of a run's metrics, broken ones left out; None stands for a value that was not finite."""
    try:
        content = (folder / METRICS).read_bytes()
    except FileNotFoundError:
        return []
    return [row for line in content.splitlines() if (row := parse_line(line)) is not None]


def parse_line(line: bytes) -> dict[str, Any] | None:
    """One line's names and values, or None where it is broken."""
    try:
        row = json.loads(line, parse_constant=refuse_constant)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) and type(row.get("images")) is int else None


def refuse_constant(constant: str) -> None:
    """For `json`: NaN and infinity are no JSON."""
    raise ValueError(f"{constant} is not JSON")


def _cut_metrics(path: Path, images: int) -> list[dict[str, Any]]:
    """Drops broken lines and those past `images` from the file, and gives those that stay."""
    if not path.exists():
        return []
    # Before the first checkpoint nothing was seen: a line at 0 images will be written again.
    kept = [row for row in read_metrics(path.parent) if row["images"] <= images and images > 0]
    content = b"".join(json.dumps(row).encode() + b"\n" for row in kept)
    if content != path.read_bytes():
        _replace(path, content)
    return kept


def _replace(path: Path, content: bytes) -> None:
    beside = path.with_name(path.name + _PARTIAL)
    with open(beside, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)  # the new name too must outlive a power cut
    finally:
        os.close(folder)


def _cut_samples(folder: Path, images: int) -> None:
    for path in folder.glob("*"):
        sample = SAMPLE_NAME.fullmatch(path.name)
        if path.name.endswith(_PARTIAL) or (sample and (int(sample[2]) > images or images == 0)):
            path.unlink()


def _event_writer(folder: Path, images: int) -> Any:
    from torch.utils.tensorboard import SummaryWriter  # takes a second to import, and only rank 0 needs it

    # The purge hides the events at its step and after it from TensorBoard. The long queue keeps `write` from waiting.
    return SummaryWriter(str(folder), purge_step=images + 1 if images else 0, max_queue=1000, flush_secs=30)
