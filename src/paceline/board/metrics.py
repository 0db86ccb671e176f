"""Read a run's metrics.jsonl as it grows, and draw the curve of a metric with a bounded number of points.

At first, each value is one point. When the capacity is reached, each pair of neighbouring points is merged into one
point with their mean and range, which halves the number of points. So memory is bounded, and no value is read twice.

Each byte is read once. Broken lines are counted, and a truncated file is read again from the start. A large file is
sampled first, so that its curves appear immediately. Once the whole file has been read, its values replace the samples.
"""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from paceline.board.files import Files
from paceline.core.types import Json, JsonObject
from paceline.runs.metrics import METRICS, parse_line, reject_constant

CAPACITY = 2048  # maximum number of points; a chart has fewer pixel columns
Numbers: TypeAlias = npt.NDArray[np.float64]
ROWS = ("images", "seconds", "mean", "low", "high")


class Extreme(NamedTuple):
    """The lowest or highest value of a metric, and the number of images seen at that value."""

    value: float
    images: float


class Series:
    """The points of one metric, with the images seen and the training time at each point."""

    def __init__(self) -> None:
        self.values = 0  # number of values added
        self.total = 0.0  # sum of all finite values
        self.last: float | None = None  # newest finite value
        self.lowest: Extreme | None = None
        self.highest: Extreme | None = None
        self._stride = 1  # number of values that are merged into one point
        self._points = np.empty((3, 0))  # rows: images, seconds, value; the rows of `_split` once values are merged

    def extend(self, images: Numbers, seconds: Numbers, values: Numbers) -> None:
        """Append values; a value that is not finite becomes a gap in the curve."""
        if not len(values):
            return
        finite = np.isfinite(values)
        if finite.any():
            self._note_values(images[finite], values[finite])
        # The position of each point's first value; points in the same stride are merged.
        first = np.append(np.arange(self._points.shape[1]) * self._stride, self.values + np.arange(len(values)))
        while first[-1] // self._stride >= CAPACITY:
            self._stride *= 2
        fresh = np.stack([images, seconds, np.where(finite, values, np.nan)])
        if self._stride == 1:
            self._points = np.concatenate([self._points, fresh], axis=1)
        else:
            starts = np.flatnonzero(np.diff(first // self._stride, prepend=-1))
            self._points = _merge(np.concatenate([_split(self._points), _split(fresh)], axis=1), starts)
        self.values += len(values)

    def _note_values(self, images: Numbers, values: Numbers) -> None:
        """Update the sum, the last value and the extremes with finite values."""
        self.total += float(values.sum())
        self.last = float(values[-1])
        low, high = int(values.argmin()), int(values.argmax())
        if self.lowest is None or values[low] < self.lowest.value:
            self.lowest = Extreme(float(values[low]), float(images[low]))
        if self.highest is None or values[high] > self.highest.value:
            self.highest = Extreme(float(values[high]), float(images[high]))

    def points(self, at_most: int = CAPACITY) -> Numbers:
        """Return an array with the rows `ROWS`; mean, low and high are NaN at a gap."""
        points = _split(self._points)
        while points.shape[1] > max(2, at_most):
            points = _merge(points, np.arange(0, points.shape[1], 2))
        images, seconds, sums, count, low, high = points
        gap = count == 0
        mean = np.divide(sums, count, out=np.full(len(sums), np.nan), where=~gap)
        return np.stack([images, seconds, mean, np.where(gap, np.nan, low), np.where(gap, np.nan, high)])


def _split(points: Numbers) -> Numbers:
    """Return points that can be merged; the rows are images, seconds, sum, count, low and high."""
    if len(points) == 6:  # already merged
        return points
    images, seconds, values = points
    gap = np.isnan(values)
    low, high = np.where(gap, np.inf, values), np.where(gap, -np.inf, values)
    return np.stack([images, seconds, np.where(gap, 0.0, values), ~gap, low, high])


def _merge(points: Numbers, starts: npt.NDArray[np.intp]) -> Numbers:
    """Merge the columns from each start index up to the next one.

    A merged column has the images and seconds of the last column that it replaces.
    """
    ends = np.append(starts[1:], points.shape[1]) - 1
    return np.concatenate(
        [
            points[:2, ends],
            np.add.reduceat(points[2:4], starts, axis=1),
            np.minimum.reduceat(points[4:5], starts, axis=1),
            np.maximum.reduceat(points[5:6], starts, axis=1),
        ]
    )


CHUNK = 2**18  # bytes read at a time; parsing a small chunk does not delay requests for long
LARGE = 2**17  # bytes; a file of at least this size is sampled first
LARGE_REMOTE = 2**21  # the same for remote files, where each sample is a request
MAX_PROBES = 256
BYTES_PER_PROBE = 2**14  # a file is sampled once for this many bytes
PROBE_BYTES = 4096
MAX_NAMES = 1000  # maximum number of metrics per run
MARK = 96  # number of bytes before the read position that are compared to detect a replaced file
LARGEST_VALUE = float(np.finfo(np.float32).max)  # the page receives curves as float32, and sums must not overflow
_AXES = ("images", "seconds", "time")


class Table:
    """A run's metrics as series; hold `lock` to read several values consistently."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.series: dict[str, Series] = {}
        self.lines = 0
        self.images = 0
        self.seconds = 0.0
        self.time = 0.0  # Unix time of the last line
        self.names_truncated = False

    def add(self, rows: Sequence[JsonObject]) -> None:
        """Append lines of metrics.jsonl to the series."""
        if rows:
            with self.lock:
                self._add(rows)

    def _add(self, rows: Sequence[JsonObject]) -> None:
        alike: dict[tuple[str, ...], list[int]] = {}  # the lines with the same metrics
        for number, row in enumerate(rows):
            alike.setdefault(tuple(row), []).append(number)
        axes = np.full((len(_AXES), len(rows)), np.nan)
        columns: dict[str, list[tuple[list[int], Numbers]]] = {}
        for names, numbers in alike.items():
            for name, values in zip(names, _columns([rows[number] for number in numbers]), strict=True):
                if name in _AXES:
                    axes[_AXES.index(name), numbers] = values
                elif name in self.series or np.isfinite(values).any():
                    columns.setdefault(name, []).append((numbers, values))
        for name, parts in columns.items():
            at = np.concatenate([np.array(numbers) for numbers, _ in parts])
            order = np.argsort(at)  # grouping lines by their set of metrics has changed the order of the values
            at, values = at[order], np.concatenate([part for _, part in parts])[order]
            self._series(name).extend(axes[0, at], axes[1, at], values)
        self.lines += len(rows)
        last_images, last_seconds, last_time = axes[:, -1]
        self.images = int(last_images) if math.isfinite(last_images) else self.images
        self.seconds = float(last_seconds) if math.isfinite(last_seconds) else self.seconds
        self.time = float(last_time) if math.isfinite(last_time) else self.time

    def _series(self, name: str) -> Series:
        series = self.series.get(name)
        if series is None:
            series = Series()
            if len(self.series) < MAX_NAMES:
                self.series[name] = series
            else:
                self.names_truncated = True
        return series


class MetricsReader:
    """Reads one metrics.jsonl file as it grows."""

    def __init__(self, files: Files, folder: str) -> None:
        self._files, self._name = files, f"{folder}/{METRICS}" if folder else METRICS
        self._restart()
        self._preview: Table | None = None

    def _restart(self) -> None:
        self._whole = Table()
        self._position, self._mark, self._skipping = 0, b"", False
        self.broken = 0
        self.size = 0

    @property
    def table(self) -> Table:
        """The series for the whole file, or for the samples while the file is still being read."""
        return self._preview or self._whole

    @property
    def read_share(self) -> float:
        """The fraction of the file that has been read, from 0 to 1."""
        return 1.0 if self._preview is None else min(1.0, self._position / max(1, self.size))

    def preview(self, size: int) -> None:
        """Read samples of a large file, so that its curves appear before the whole file has been read."""
        if self._position or self._preview or size < (LARGE if self._files.local else LARGE_REMOTE):
            return
        num_probes = min(MAX_PROBES, size // BYTES_PER_PROBE)
        self.size = size
        starts = np.linspace(0, size - PROBE_BYTES, num_probes).astype(int).tolist()
        lines: list[bytes] = []
        for number, piece in enumerate(self._files.sample(self._name, starts, PROBE_BYTES)):
            whole = piece.split(b"\n")[number > 0 : -1]  # the first and last lines of a sample may be incomplete
            lines += whole[-1:] if number == num_probes - 1 else whole[:1]
        rows, _ = _parse(lines)
        table = Table()
        table.add(rows)
        self._preview = table if rows else None

    def advance(self, size: int) -> bool:
        """Read the next chunk of a file of `size` bytes; return False if there is nothing more to read."""
        self.size = size
        if size < self._position:
            self._restart()
        if size == self._position:
            self._preview = None if self._mark else self._preview
            return False
        start = self._position - len(self._mark)
        content = self._files.read(self._name, start, min(size, self._position + CHUNK))
        if content[: len(self._mark)] != self._mark:
            self._restart()
            return True
        content = content[len(self._mark) :]
        whole, newline, rest = content.rpartition(b"\n")
        if newline:
            self._take(whole, len(whole) + 1)
        elif len(rest) >= CHUNK:  # the line is longer than a chunk
            self._skip_line(len(rest))
        if self._position >= size or not newline:
            self._preview = None
        return bool(newline) or len(rest) >= CHUNK

    def _take(self, whole: bytes, length: int) -> None:
        lines = whole.split(b"\n")
        if self._skipping:
            lines, self._skipping = lines[1:], False
        rows, broken = _parse(lines)
        self._whole.add(rows)
        self.broken += broken
        self._position += length
        self._mark = (whole + b"\n")[-MARK:]

    def _skip_line(self, length: int) -> None:
        self.broken += not self._skipping
        self._skipping = True
        self._position += length
        self._mark = b""


def _parse(lines: Sequence[bytes]) -> tuple[list[JsonObject], int]:
    """Return the valid lines and the number of broken lines.

    All lines are parsed together, which is fast. If that fails, each line is parsed separately.
    """
    try:
        rows: list[JsonObject] = json.loads(b"[" + b",".join(lines) + b"]", parse_constant=reject_constant)
        if (
            len(rows) == len(lines)
            and set(map(type, rows)) == {dict}
            and {type(row["images"]) for row in rows} == {int}
        ):
            return rows, 0
    except (ValueError, KeyError, RecursionError):
        pass
    found = [parse_line(line) for line in lines]
    whole: list[JsonObject] = [dict(row) for row in found if row is not None]
    return whole, len(lines) - len(whole)


def _columns(rows: Sequence[JsonObject]) -> Numbers:
    """Return one row of values per metric, for lines with the same metrics.

    Values that are not numbers, or are too large, become NaN.
    """
    values = list(chain.from_iterable(map(dict.values, rows)))
    if not set(map(type, values)) <= _NUMBERS:
        values = [_number(value) for value in values]
    try:
        table = np.array(values, dtype=np.float64)
    except OverflowError:  # an integer is too large for a float
        table = np.array([_number(value) for value in values])
    table[np.abs(table) > LARGEST_VALUE] = np.nan
    return table.reshape(len(rows), -1).T


_NUMBERS = {int, float, type(None)}


def _number(value: Json) -> float:
    try:
        return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else math.nan
    except OverflowError:
        return math.nan
