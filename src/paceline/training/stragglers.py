"""Find a rank that is slower than the others, from the time that each rank works without waiting for the others."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

SLOWER = 0.15  # a rank is a straggler if its work takes longer than that of the others by more than this fraction
NUM_INTERVALS = 2  # in this many log intervals in a row, because a busy machine can delay any rank once


class Work(NamedTuple):
    """The time of one rank per step, in seconds."""

    work: float  # without waiting for other ranks; on GPUs, only the time waiting for data
    data: float  # waiting for data
    step: float  # the whole step


@dataclass(frozen=True)
class Straggler:
    """A rank that delays the others."""

    rank: int
    work: Work
    others: float  # median of the other ranks' work, in seconds per step

    @property
    def slowdown(self) -> float:
        """How much longer a step takes because of this rank, as a fraction."""
        return (self.work.work - self.others) / max(self.work.step - (self.work.work - self.others), 1e-9)

    def __str__(self) -> str:
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
        if slowest and self._times >= NUM_INTERVALS:
            self.straggler = slowest
        elif not slowest and self._times >= NUM_INTERVALS:
            self.straggler = None
        if self.straggler and (before is None or before.rank != self.straggler.rank):
            return f"straggler: {self.straggler}"
        return f"straggler: rank {before.rank} is as fast as the others again" if before and not self.straggler else ""


def slowest_rank(ranks: Sequence[Work]) -> Straggler | None:
    """Return the slowest rank if it delays the others noticeably."""
    if len(ranks) < 2:
        return None
    rank = max(range(len(ranks)), key=lambda number: ranks[number].work)
    others = statistics.median(one.work for number, one in enumerate(ranks) if number != rank)
    found = Straggler(rank, ranks[rank], others)
    excess = ranks[rank].work - others
    is_slower = excess > SLOWER * others and found.slowdown > SLOWER / 2
    return found if is_slower else None
