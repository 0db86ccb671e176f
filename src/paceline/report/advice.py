"""Recommend the fastest group of runs among those of equal quality, or the simplest if several are equally fast."""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from paceline.report.groups import known_strategy
from paceline.report.model import Group, Recommendation, Summary, WorseGroup

CLOSE_QUALITY = 0.02  # if there is only one seed, metrics that differ by less than this fraction count as equal
CLOSE_SPEED = 0.05  # assumed relative spread of a speed if the actual spread is unknown
STANDARD_ERRORS = 2


class _Candidate(NamedTuple):
    """A group of runs that can be recommended, because its speed was measured on separate devices."""

    group: Group
    speed: float
    selection_metric: Summary | None

    @property
    def spread(self) -> float:
        std = self.group.speed_spread.std
        return CLOSE_SPEED * self.speed if std is None else std


class _Quality(NamedTuple):
    """The quality of a group of runs, with its uncertainty."""

    mean: float
    error: float  # standard error from the spread across seeds and the number of evaluated samples


class _Choice(NamedTuple):
    group: str
    fastest: str
    tied: list[str]


def recommend(groups: Mapping[str, Group], metric: str, mode: str) -> Recommendation | None:
    """Recommend a group of runs, and list the groups that are equally fast and those of lower quality.

    Quality is measured by `metric`, which selected the checkpoints. Results on the test split are not used. If some
    groups have no value for `metric`, `best` is None, `unevaluated` lists these groups, and only the speed counts.
    """
    found = {key: one for key, group in groups.items() if (one := _candidate(group)) is not None}
    if not found:
        return None
    unevaluated = [key for key, one in found.items() if one.selection_metric is None]
    if unevaluated:
        choice = _choose(found, list(found))
        return Recommendation(
            *choice, best=None, equal_quality=[], max_gap=None, worse=None, several_seeds=False, unevaluated=unevaluated
        )
    sign = 1 if mode == "max" else -1
    values = {key: one.selection_metric for key, one in found.items() if one.selection_metric is not None}
    several_seeds = all(value.n > 1 for value in values.values())
    best = max(found, key=lambda key: sign * values[key].mean)
    qualities = {key: _quality(one.group, found, metric, several_seeds) for key, one in found.items()}
    equal = [key for key, own in qualities.items() if _not_worse(own, qualities[best], sign)]
    choice = _choose(found, equal)
    gaps = {key: sign * (values[best].mean - value.mean) for key, value in values.items()}
    fast = found[choice.group].speed
    return Recommendation(
        *choice,
        best=best,
        equal_quality=equal,
        max_gap=max(gaps[key] for key in equal),
        worse={key: WorseGroup(gaps[key], one.speed / fast) for key, one in found.items() if key not in equal},
        several_seeds=several_seeds,
        unevaluated=[],
    )


def is_share(metric: str) -> bool:
    """Return whether a metric is a percentage of the evaluated samples."""
    return "/top" in metric


def complexity(group: Group) -> tuple[int, int]:
    """Return a sort key for groups: simple strategies first, unknown strategies last, then by number of devices."""
    strategy = known_strategy(group.strategy)
    return (sys.maxsize if strategy is None else strategy.complexity, group.devices)


def _candidate(group: Group) -> _Candidate | None:
    if group.images_per_second is None or group.shares_a_gpu:
        return None
    return _Candidate(group, group.images_per_second.mean, group.selection_metric)


def _quality(group: Group, candidates: Mapping[str, _Candidate], metric: str, several_seeds: bool) -> _Quality:
    """Return the quality of a group or, if a group has only one seed, the mean quality of its family.

    The groups of a family differ only in strategy and number of devices. Strategies produce the same weights up to
    rounding, so differences within a family are due to chance.
    """
    alike = [one.selection_metric for one in candidates.values() if one.group.family == group.family]
    own = [one for one in ([group.selection_metric] if several_seeds else alike) if one is not None]
    mean = statistics.fmean(summary.mean for summary in own)
    errors = [summary.std for summary in own if summary.std is not None]
    if not several_seeds:
        errors.append(CLOSE_QUALITY * abs(mean) / STANDARD_ERRORS)
        errors += [statistics.stdev(summary.mean for summary in own)] if len(own) > 1 else []
    if is_share(metric) and group.num_evaluated:
        errors.append(_binomial_error(mean, group.num_evaluated))
    return _Quality(mean, max(errors))


def _binomial_error(percent: float, samples: float) -> float:
    """Return the standard error of a percentage.

    Adding one hit and one miss keeps the error above zero at 0 % and 100 %.
    """
    share = (percent / 100 * samples + 1) / (samples + 2)
    return 100 * math.sqrt(share * (1 - share) / samples)


def _not_worse(own: _Quality, best: _Quality, sign: int) -> bool:
    return sign * (best.mean - own.mean) <= STANDARD_ERRORS * max(own.error, best.error)


def _choose(candidates: Mapping[str, _Candidate], among: Sequence[str]) -> _Choice:
    """Choose the simplest of the groups that are as fast as the fastest, within the spread of their speeds."""
    fastest = max(among, key=lambda key: candidates[key].speed)

    def ties(key: str) -> bool:
        gap = candidates[fastest].speed - candidates[key].speed
        return gap <= max(candidates[fastest].spread, candidates[key].spread)

    tied = [key for key in among if ties(key)]
    chosen = min(tied, key=lambda key: (*complexity(candidates[key].group), -candidates[key].speed))
    return _Choice(chosen, fastest, tied)
