"""Find a rank that is slower than the others, from the time that each rank works without waiting for the others."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

MIN_STEPS = 20  # shorter log intervals are pooled, because the times of a few steps vary by chance
SLOWER = 0.15  # a rank is a straggler if its work takes longer than that of the others by more than this fraction
NUM_INTERVALS = 2  # in this many intervals in a row, because a busy machine can delay any rank once
# The same two limits for a rank that is slow only in some steps. They are stricter, because other programs on a busy
# machine also delay some steps of any rank.
SLOWER_AT_TIMES = 0.2
NUM_INTERVALS_AT_TIMES = 3
DROPPED = 0.1  # fraction of the steps that a trimmed mean leaves out: the slowest ones
# The difference must also be larger than what chance explains. With two ranks, it must exceed 3.5 standard errors in
# each interval; with more ranks, the limit is higher, because one of many ranks is more often slow by chance.
CHANCE = 4.7e-4  # probability that chance alone exceeds the limit for any rank, with normal noise
AT_TIMES_LIMIT = 0.6  # fraction of the limit for a rank that is slow only in some steps: three intervals must exceed it


class StepTimes(NamedTuple):
    """How long one rank takes for one step, in seconds."""

    work: float  # without waiting for other ranks; on GPUs, only the time waiting for data
    data: float  # waiting for data
    step: float  # the whole step


class Work(NamedTuple):
    """How long one rank takes per step, in seconds, over several steps. Ranks exchange these numbers."""

    work: float  # median; see `StepTimes`
    data: float  # median
    step: float  # median
    error: float = 0.0  # standard error of the median work
    mean: float = 0.0  # of the work
    mean_error: float = 0.0  # standard error of the mean
    trimmed_mean: float = 0.0  # of the work, without the slowest steps, which other programs may have delayed
    num_steps: float = 0.0

    @classmethod
    def of(cls, steps: Sequence[StepTimes]) -> Work:
        """Summarise the times of several steps."""
        if not steps:
            return cls(0.0, 0.0, 0.0)
        work, data, step = zip(*steps, strict=True)
        medians = statistics.median(work), statistics.median(data), statistics.median(step)
        count, ordered, mean = len(work), sorted(work), statistics.fmean(work)
        # For normal noise, a standard deviation is the distance between the quartiles divided by 1.35, and the standard
        # error of a median is 1.25 times that of a mean. The quartiles do not depend on a few delayed steps.
        quartiles = ordered[count // 4], ordered[(3 * count) // 4]
        error = 1.25 * (quartiles[1] - quartiles[0]) / 1.35 / math.sqrt(count)
        deviation = math.dist(work, [mean] * count) / math.sqrt(max(1, count - 1))  # statistics.stdev is slow
        trimmed = statistics.fmean(ordered[: count - int(DROPPED * count)])
        return cls(*medians, error, mean, deviation / math.sqrt(count), trimmed, float(count))


@dataclass(frozen=True)
class Straggler:
    """A rank that delays the others."""

    rank: int
    work: Work
    others: float  # median of the other ranks' work, in seconds per step
    is_at_times: bool = (
        False  # whether it is slow only in some steps; then `others` is the median of their trimmed means
    )

    @property
    def slowdown(self) -> float:
        """How much longer a step takes because of this rank, as a fraction."""
        if self.is_at_times:  # the median step is not delayed
            return (self.work.trimmed_mean - self.others) / max(self.work.step, 1e-9)
        return (self.work.work - self.others) / max(self.work.step - (self.work.work - self.others), 1e-9)

    @property
    def num_intervals(self) -> int:
        """The number of consecutive intervals in which the rank must be slow before it is reported."""
        return NUM_INTERVALS_AT_TIMES if self.is_at_times else NUM_INTERVALS

    def __str__(self) -> str:
        if self.is_at_times:
            mean, typical, others = 1000 * self.work.trimmed_mean, 1000 * self.work.work, 1000 * self.others
            return (
                f"rank {self.rank} is slow in some steps: its own work takes {mean:.4g} ms per step on average "
                f"(median {typical:.4g} ms); the other ranks need {others:.4g} ms on average"
            )
        own, others = 1000 * self.work.work, 1000 * self.others
        share = self.work.data / max(self.work.work, 1e-9)
        data = f", {share:.0%} of it waiting for data" if share > 0.1 else ""
        return (
            f"rank {self.rank} needs {own:.4g} ms per step for its own work{data}; the other ranks need {others:.4g} ms"
        )


class StragglerWatch:
    """Compares the ranks at log lines; reports a straggler after several consecutive intervals."""

    def __init__(self) -> None:
        self._is_first = True
        self._suspect, self._times = -1, 0
        self._times_as_fast = 0  # consecutive intervals in which the straggler was as fast as the others
        self.straggler: Straggler | None = None  # the current one

    def add(self, ranks: Sequence[Work]) -> str:
        """Compare the ranks in one interval; return a line for the user if the straggler has changed.

        The first interval is left out, because it includes the warm-up. Intervals of fewer than `MIN_STEPS` steps are
        ignored; `Pace` pools them.
        """
        if any(one.num_steps < MIN_STEPS for one in ranks):
            return ""
        if self._is_first:
            self._is_first = False
            return ""
        slowest = slowest_rank(ranks)
        suspect = slowest.rank if slowest else -1
        self._suspect, self._times = suspect, self._times + 1 if suspect == self._suspect else 1
        before = self.straggler
        # A difference that chance could explain does not show that a straggler has recovered.
        self._times_as_fast = self._times_as_fast + 1 if before and is_as_fast(ranks, before.rank) else 0
        if slowest and self._times >= slowest.num_intervals:
            self.straggler = slowest
        elif self._times_as_fast >= NUM_INTERVALS:
            self.straggler = None
        if self.straggler and (before is None or before.rank != self.straggler.rank):
            self._times_as_fast = 0
            return f"straggler: {self.straggler}"
        return f"straggler: rank {before.rank} is as fast as the others again" if before and not self.straggler else ""


def slowest_rank(ranks: Sequence[Work]) -> Straggler | None:
    """Return the slowest rank if it delays the others noticeably, in most steps or at times, and not by chance."""
    if len(ranks) < 2:
        return None
    limit = statistics.NormalDist().inv_cdf(1 - CHANCE / len(ranks))
    found = _slowest(ranks, lambda one: one.work)
    excess = found.work.work - found.others
    error = _error(ranks, found.rank, lambda one: one.error)
    if excess > max(SLOWER * found.others, limit * error) and found.slowdown > SLOWER / 2:
        return found
    found = _slowest(ranks, lambda one: one.trimmed_mean, is_at_times=True)
    excess = found.work.mean - _others(ranks, found.rank, lambda one: one.mean)
    error = _error(ranks, found.rank, lambda one: one.mean_error)
    is_slower = found.work.trimmed_mean - found.others > SLOWER_AT_TIMES * found.others and found.slowdown > SLOWER
    return found if is_slower and excess > AT_TIMES_LIMIT * limit * error else None


def is_as_fast(ranks: Sequence[Work], rank: int) -> bool:
    """Return whether a rank works about as fast as the others, both in most steps and on average."""
    values: tuple[Callable[[Work], float], ...] = (lambda one: one.work, lambda one: one.mean)
    return all(value(ranks[rank]) <= (1 + SLOWER / 2) * _others(ranks, rank, value) for value in values)


def _slowest(ranks: Sequence[Work], value: Callable[[Work], float], *, is_at_times: bool = False) -> Straggler:
    rank = max(range(len(ranks)), key=lambda number: value(ranks[number]))
    return Straggler(rank, ranks[rank], _others(ranks, rank, value), is_at_times)


def _others(ranks: Sequence[Work], rank: int, value: Callable[[Work], float]) -> float:
    return statistics.median(value(one) for number, one in enumerate(ranks) if number != rank)


def _error(ranks: Sequence[Work], rank: int, error: Callable[[Work], float]) -> float:
    """Return the standard error of the difference between a rank and the median of the others."""
    return math.hypot(error(ranks[rank]), _others(ranks, rank, error))
