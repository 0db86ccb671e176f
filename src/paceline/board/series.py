"""One metric over a run of any length, as a bounded number of points.

At first, each value is one point. When the capacity is reached, each pair of neighboring points is merged into one
point with their mean and range, which halves the number of points. Memory is bounded and nothing is read twice.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

CAPACITY = 2048  # points; more than a chart has pixel columns
Numbers: TypeAlias = npt.NDArray[np.float64]
ROWS = ("images", "seconds", "mean", "low", "high")


class Series:
    """The points of a metric, by images seen and by training time."""

    def __init__(self) -> None:
        self.values = 0  # number of values added
        self.total = 0.0  # sum of all finite values
        self.last: float | None = None  # newest finite value
        self._stride = 1  # values per point
        self._num = 0
        self._points = np.empty((6, 64))  # images, seconds, sum, count, low, high

    def extend(self, images: Numbers, seconds: Numbers, values: Numbers) -> None:
        """Append values; a value that is not finite becomes a gap."""
        if not len(values):
            return
        finite = np.isfinite(values)
        self.total += float(values[finite].sum())
        if finite.any():
            self.last = float(values[finite][-1])
        while -(-(self.values + len(values)) // self._stride) > CAPACITY:
            self._halve()
        fresh = np.stack(
            [
                images,
                seconds,
                np.where(finite, values, 0.0),
                finite,
                np.where(finite, values, np.inf),
                np.where(finite, values, -np.inf),
            ]
        )
        point = (self.values + np.arange(len(values))) // self._stride
        starts = np.flatnonzero(np.diff(point, prepend=-1))
        fresh = _merge(fresh, starts)
        if point[0] < self._num:  # the last point was not full
            both = np.concatenate([self._points[:, self._num - 1 : self._num], fresh[:, :1]], axis=1)
            self._points[:, self._num - 1] = _merge(both, np.array([0]))[:, 0]
            fresh = fresh[:, 1:]
        self._append(fresh)
        self.values += len(values)

    def points(self, at_most: int = CAPACITY) -> Numbers:
        """Return the rows images, seconds, mean, low and high; a point without a finite value is NaN."""
        points = self._points[:, : self._num]
        while points.shape[1] > max(2, at_most):
            points = _merge(points, np.arange(0, points.shape[1], 2))
        images, seconds, sums, count, low, high = points
        gap = count == 0
        mean = np.divide(sums, count, out=np.full(len(sums), np.nan), where=~gap)
        return np.stack([images, seconds, mean, np.where(gap, np.nan, low), np.where(gap, np.nan, high)])

    def _halve(self) -> None:
        merged = _merge(self._points[:, : self._num], np.arange(0, self._num, 2))
        self._points[:, : merged.shape[1]] = merged
        self._num, self._stride = merged.shape[1], 2 * self._stride

    def _append(self, fresh: Numbers) -> None:
        needed = self._num + fresh.shape[1]
        if needed > self._points.shape[1]:
            room = np.empty((6, min(CAPACITY, max(needed, 2 * self._points.shape[1]))))
            room[:, : self._num] = self._points[:, : self._num]
            self._points = room
        self._points[:, self._num : needed] = fresh
        self._num = needed


def _merge(points: Numbers, starts: npt.NDArray[np.intp]) -> Numbers:
    """Merge the columns from each start up to the next; the result has the position of the last merged column."""
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
