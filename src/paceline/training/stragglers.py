"""Find a rank that is slower than the others, from the time that each rank works without waiting for the others."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

SLOWER = 0.15  # a rank is a straggler if its work takes longer than that of the others by more than this fraction
NUM_INTERVALS = 2  # in this many log intervals in a row, because a busy machine can delay any rank once
# The same two limits for a rank that is slow only in some steps. They are stricter, because other programs on a busy
# machine also delay some steps of any rank.
SLOWER_AT_TIMES = 0.2
NUM_INTERVALS_AT_TIMES = 3
MIN_STEPS = 10  # a shorter log interval has too few steps for a trimmed mean
DROPPED = 0.1  # fraction of the steps that a trimmed mean leaves out: the slowest ones


class Work(NamedTuple):
    """How long one rank takes per step, in seconds. All values are medians over the steps, except for `mean`."""

    work: float  # without waiting for other ranks; on GPUs, only the time waiting for data
    data: float  # waiting for data
    step: float  # the whole step
    mean: float = 0.0  # trimmed mean of the work; 0 if there are too few steps


def trimmed_mean(seconds: Sequence[float]) -> float:
    """Return the mean without the slowest steps, which other programs may have delayed; 0 if there are too few."""
    if len(seconds) < MIN_STEPS:
        return 0.0
    return statistics.fmean(sorted(seconds)[: len(seconds) - int(DROPPED * len(seconds))])


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
            return (self.work.mean - self.others) / max(self.work.step, 1e-9)
        return (self.work.work - self.others) / max(self.work.step - (self.work.work - self.others), 1e-9)

    @property
    def num_intervals(self) -> int:
        """The number of consecutive log intervals in which the rank must be slow before it is reported."""
        return NUM_INTERVALS_AT_TIMES if self.is_at_times else NUM_INTERVALS

    def __str__(self) -> str:
        if self.is_at_times:
            mean, typical, others = 1000 * self.work.mean, 1000 * self.work.work, 1000 * self.others
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
    """Compares the ranks at every log line; reports a straggler after several consecutive log intervals."""

    def __init__(self) -> None:
        self._is_first = True
        self._suspect, self._times = -1, 0
        self.straggler: Straggler | None = None  # the current one

    def add(self, ranks: Sequence[Work]) -> str:
        """Compare the ranks in one log interval; return a line for the user if the straggler has changed.

        The first interval is left out, because it includes the warm-up.
        """
        if self._is_first:
            self._is_first = False
            return ""
        slowest = slowest_rank(ranks)
        suspect = slowest.rank if slowest else -1
        self._suspect, self._times = suspect, self._times + 1 if suspect == self._suspect else 1
        before = self.straggler
        if slowest and self._times >= slowest.num_intervals:
            self.straggler = slowest
        elif not slowest and self._times >= NUM_INTERVALS:
            self.straggler = None
        if self.straggler and (before is None or before.rank != self.straggler.rank):
            return f"straggler: {self.straggler}"
        return f"straggler: rank {before.rank} is as fast as the others again" if before and not self.straggler else ""


def slowest_rank(ranks: Sequence[Work]) -> Straggler | None:
    """Return the slowest rank if it delays the others noticeably, in most steps or at times."""
    if len(ranks) < 2:
        return None
    found = _slowest(ranks, [one.work for one in ranks])
    if found.work.work - found.others > SLOWER * found.others and found.slowdown > SLOWER / 2:
        return found
    found = _slowest(ranks, [one.mean for one in ranks], is_at_times=True)
    is_known = all(one.mean for one in ranks)
    if is_known and found.work.mean - found.others > SLOWER_AT_TIMES * found.others and found.slowdown > SLOWER:
        return found
    return None


def _slowest(ranks: Sequence[Work], seconds: Sequence[float], *, is_at_times: bool = False) -> Straggler:
    rank = max(range(len(ranks)), key=seconds.__getitem__)
    others = statistics.median(one for number, one in enumerate(seconds) if number != rank)
    return Straggler(rank, ranks[rank], others, is_at_times)
