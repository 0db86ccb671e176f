"""Read a run's metrics.jsonl as it grows, and draw the curve of a metric with a bounded number of points.

At first, each value is one point. When the capacity is reached, each pair of neighbouring points is merged into one
point with their mean and range, which halves the number of points. So memory is bounded, and no value is read twice.

Each byte is read once. Broken lines are counted, and a truncated file is read again from the start. A large local file
is sampled first, so that its curves appear immediately; once it has been read completely, its values replace these.
"""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Sequence
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
LARGE = 2**20  # bytes; a local file of at least this size is sampled first
NUM_PROBES, PROBE_BYTES = 256, 4096  # samples of a file
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
        axes = np.array([[_number(row.get(name)) for row in rows] for name in _AXES])
        columns: dict[str, tuple[list[int], list[float]]] = {}
        for number, row in enumerate(rows):
            for name, value in row.items():
                if name not in _AXES:
                    at, values = columns.setdefault(name, ([], []))
                    at.append(number)
                    values.append(_number(value))
        with self.lock:
            for name, (at, values) in columns.items():
                if name in self.series or np.isfinite(values).any():
                    self._series(name).extend(axes[0, at], axes[1, at], np.array(values))
            self.lines += len(rows)
            if rows:
                images, seconds, now = (float(newest) for newest in axes[:, -1])
                self.images = int(images) if math.isfinite(images) else self.images
                self.seconds = seconds if math.isfinite(seconds) else self.seconds
                self.time = now if math.isfinite(now) else self.time

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
        self.read_share = 0.0  # fraction of the file that has been read
        self._preview: Table | None = None
        self._restart()

    @property
    def table(self) -> Table:
        """The series for the whole file, or for samples of it while the file is still being read."""
        return self._preview or self._whole

    def _restart(self) -> None:
        self._whole = Table()
        self._position, self._mark, self._skipping = 0, b"", False
        self.broken = 0

    def advance(self, size: int) -> bool:
        """Read the next chunk of a file of `size` bytes; return False if there is nothing more to read."""
        if self._files.local and size >= LARGE and not self._position and not self._preview:
            self._preview = self._sampled(size)
            return True
        more = self._read_chunk(size)
        self.read_share = self._position / size if more and self._position < size else 1.0
        if self.read_share == 1:
            self._preview = None
        return more

    def _sampled(self, size: int) -> Table:
        """Read samples of a large file, so that its curves appear before the whole file has been read."""
        starts = np.linspace(0, size - PROBE_BYTES, NUM_PROBES).astype(int).tolist()
        lines: list[bytes] = []
        for start in starts:
            piece = self._files.read(self._name, start, start + PROBE_BYTES)
            whole = piece.split(b"\n")[start > 0 : -1]  # the first and last lines of a sample may be incomplete
            lines += whole[-1:] if start == starts[-1] else whole[:1]
        table = Table()
        table.add(_parse(lines)[0])
        return table

    def _read_chunk(self, size: int) -> bool:
        if size < self._position:
            self._restart()
        if size == self._position:
            return False
        start = self._position - len(self._mark)
        content = self._files.read(self._name, start, min(size, self._position + CHUNK))
        if content[: len(self._mark)] != self._mark:
            self._restart()
            return True
        whole, newline, rest = content[len(self._mark) :].rpartition(b"\n")
        if newline:
            self._take(whole, len(whole) + 1)
        elif len(rest) >= CHUNK:  # the line is longer than a chunk
            self._skip_line(len(rest))
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
    whole = [row for line in lines if (row := parse_line(line)) is not None]
    return whole, len(lines) - len(whole)


def _number(value: Json) -> float:
    """Return a value as a number; NaN for values of other types and for numbers that are too large."""
    number = value if isinstance(value, int | float) and not isinstance(value, bool) else math.nan
    return float(number) if abs(number) <= LARGEST_VALUE else math.nan
