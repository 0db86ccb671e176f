"""The curve of one metric, with a bounded number of points for a run of any length.

At first, each value is one point. When the capacity is reached, each pair of neighbouring points is merged into one
point with their mean and range, which halves the number of points. So memory is bounded, and no value is read twice.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

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
        self._num = 0
        self._points = np.empty((3, 64))  # rows: images, seconds, value; the rows of `_split` once values are merged

    def extend(self, images: Numbers, seconds: Numbers, values: Numbers) -> None:
        """Append values; a value that is not finite becomes a gap in the curve."""
        if not len(values):
            return
        finite = np.isfinite(values)
        if finite.all():
            self._note_values(images, values)
        elif finite.any():
            self._note_values(images[finite], values[finite])
        while -(-(self.values + len(values)) // self._stride) > CAPACITY:
            self._halve()
        fresh = np.stack([images, seconds, np.where(finite, values, np.nan)])
        self._append(fresh if self._stride == 1 else self._merge_into_last(_split(fresh)))
        self.values += len(values)

    def _merge_into_last(self, fresh: Numbers) -> Numbers:
        """Merge new values into points; add the first ones to the last point if it has room, and return the others."""
        point = (self.values + np.arange(fresh.shape[1])) // self._stride
        fresh = _merge(fresh, np.flatnonzero(np.diff(point, prepend=-1)))
        if point[0] >= self._num:
            return fresh
        both = np.concatenate([self._points[:, self._num - 1 : self._num], fresh[:, :1]], axis=1)
        self._points[:, self._num - 1] = _merge(both, np.array([0]))[:, 0]
        return fresh[:, 1:]

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
        points = self._merged()
        while points.shape[1] > max(2, at_most):
            points = _merge(points, np.arange(0, points.shape[1], 2))
        images, seconds, sums, count, low, high = points
        gap = count == 0
        mean = np.divide(sums, count, out=np.full(len(sums), np.nan), where=~gap)
        return np.stack([images, seconds, mean, np.where(gap, np.nan, low), np.where(gap, np.nan, high)])

    def _merged(self) -> Numbers:
        """Return the points with the rows of `_split`."""
        points = self._points[:, : self._num]
        return _split(points) if self._stride == 1 else points

    def _halve(self) -> None:
        merged = _merge(self._merged(), np.arange(0, self._num, 2))
        self._num, self._stride = merged.shape[1], 2 * self._stride
        self._points = np.empty((6, CAPACITY))
        self._points[:, : self._num] = merged

    def _append(self, fresh: Numbers) -> None:
        needed = self._num + fresh.shape[1]
        if needed > self._points.shape[1]:
            room = np.empty((len(self._points), min(CAPACITY, max(needed, 2 * self._points.shape[1]))))
            room[:, : self._num] = self._points[:, : self._num]
            self._points = room
        self._points[:, self._num : needed] = fresh
        self._num = needed


def _split(points: Numbers) -> Numbers:
    """Return single values as points that can be merged; the rows are images, seconds, sum, count, low and high."""
    images, seconds, values = points
    gap = np.isnan(values)
    low, high = np.where(gap, np.inf, values), np.where(gap, -np.inf, values)
    return np.stack([images, seconds, np.where(gap, 0.0, values), ~gap, low, high])


def _merge(points: Numbers, starts: npt.NDArray[np.intp]) -> Numbers:
    """Merge the columns from each start index up to the next one.

    A merged column has the images and seconds of the last column that it replaces.
    """
    if not len(starts):
        return points[:, :0]
    ends = np.append(starts[1:], points.shape[1]) - 1
    return np.concatenate(
        [
            points[:2, ends],
            np.add.reduceat(points[2:4], starts, axis=1),
            np.minimum.reduceat(points[4:5], starts, axis=1),
            np.maximum.reduceat(points[5:6], starts, axis=1),
        ]
    )
