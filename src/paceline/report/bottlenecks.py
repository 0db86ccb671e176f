"""What delays a run: its straggler and its profile, read from the run folder."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from paceline.report.log_intervals import Line
from paceline.report.phrases import as_words
from paceline.report.run import StragglerRank
from paceline.runs.metrics import STRAGGLER_RANK, STRAGGLER_SLOWDOWN
from paceline.runs.profile_summary import KernelTime, ProfileSummary, Remedy, read_profile


def find_straggler(lines: Sequence[Line]) -> StragglerRank | None:
    """Return the rank that was the straggler in most log intervals; None if there was none."""
    found = [
        (int(rank), line.get(STRAGGLER_SLOWDOWN) or 0.0)
        for line in lines
        if (rank := line.get(STRAGGLER_RANK)) is not None
    ]
    counts = Counter(rank for rank, _ in found if rank >= 0)
    if not counts:
        return None
    rank, count = counts.most_common(1)[0]
    return StragglerRank(rank, count / len(found), statistics.median(slow for one, slow in found if one == rank))


def profile_of(run: Path) -> ProfileSummary | None:
    """Return a run's profile with its texts ready for a report; None if there is none."""
    found = read_profile(run)
    if found is None:
        return None
    return replace(
        found,
        device=as_words(found.device),
        sections=_words(found.sections),
        phases=_words(found.phases),
        run_shares=_words(found.run_shares),
        waits=_words(found.waits),
        kernels=tuple(KernelTime(as_words(one.name), one.share, one.calls_per_step) for one in found.kernels),
        remedies=tuple(Remedy(as_words(one.action), as_words(one.reason), one.gain) for one in found.remedies),
        notes=tuple(map(as_words, found.notes)),
    )


def _words(shares: dict[str, float]) -> dict[str, float]:
    return {as_words(name): share for name, share in shares.items()}
