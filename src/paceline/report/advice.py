"""Which group to use: the simplest of the fastest among those whose quality nothing measured sets apart."""

from __future__ import annotations

import math
import statistics
from typing import Any, NamedTuple

Group = dict[str, Any]
SIMPLEST_FIRST = ("single", "ddp", "lightning", "dp")
CLOSE = 0.02  # without several seeds, qualities this near (relative) are called equal
CLOSE_SPEED = 0.05  # likewise speeds, where neither seeds nor logged stretches say how they vary
STANDARD_ERRORS = 2


class _Quality(NamedTuple):
    """What a group is judged by."""

    mean: float
    error: float  # that its seeds, or the number of its judged samples, explain


def recommend(groups: dict[str, Group], metric: str, end: str) -> dict[str, Any] | None:
    """The group to use, what it ties with in speed, and how far the others are behind in quality.

    Groups are judged by `metric`, which chose their checkpoints; the test split takes no part. Where some have no such
    value, quality says nothing: `best` is None, `unjudged` names them, and the choice is by speed alone.
    """
    found = {key: one for key, one in groups.items() if one["images_per_second"] and not one["shares_a_gpu"]}
    if not found:
        return None
    unjudged = [key for key, group in found.items() if not group["chosen_by"]]
    if unjudged:
        return _choose(found, list(found)) | {"best": None, "equal": [], "by_seeds": False, "unjudged": unjudged}
    sign = 1 if end == "max" else -1
    by_seeds = all(group["chosen_by"]["n"] > 1 for group in found.values())
    best = max(found, key=lambda key: sign * found[key]["chosen_by"]["mean"])
    judged = {key: _quality(group, found, metric, by_seeds) for key, group in found.items()}
    equal = [key for key, own in judged.items() if _not_worse(own, judged[best], sign)]
    choice = _choose(found, equal)
    gaps = {key: sign * (found[best]["chosen_by"]["mean"] - one["chosen_by"]["mean"]) for key, one in found.items()}
    fast = _speed(found[choice["group"]])
    return choice | {
        "best": best,
        "equal": equal,
        "within": max(gaps[key] for key in equal),
        "behind": {
            key: {"gap": gaps[key], "speed": _speed(group) / fast} for key, group in found.items() if key not in equal
        },
        "by_seeds": by_seeds,
        "unjudged": [],
    }


def is_share(metric: str) -> bool:
    """Whether a metric is a percentage of judged samples."""
    return "/top" in metric


def _quality(group: Group, groups: dict[str, Group], metric: str, by_seeds: bool) -> _Quality:
    """A group's own quality; without several seeds for all, that of the groups that differ in where they ran alone.

    Strategies give the same weights but for rounding, so that none of them can be better by more than chance.
    """
    alike = [one["chosen_by"] for one in groups.values() if one["family"] == group["family"]]
    own = [group["chosen_by"]] if by_seeds else alike
    mean = statistics.fmean(summary["mean"] for summary in own)
    errors = [summary["std"] for summary in own if summary["std"] is not None]
    if not by_seeds:
        errors.append(CLOSE * abs(mean) / STANDARD_ERRORS)
        errors += [statistics.stdev(summary["mean"] for summary in own)] if len(own) > 1 else []
    if is_share(metric) and group["judged_on"]:
        errors.append(_binomial_error(mean, group["judged_on"]))
    return _Quality(mean, max(errors))


def _binomial_error(percent: float, samples: float) -> float:
    """The standard error of a percentage of so many samples; one more hit and one more miss keep it above zero."""
    share = (percent / 100 * samples + 1) / (samples + 2)
    return 100 * math.sqrt(share * (1 - share) / samples)


def _not_worse(own: _Quality, best: _Quality, sign: int) -> bool:
    return sign * (best.mean - own.mean) <= STANDARD_ERRORS * max(own.error, best.error)


def _choose(groups: dict[str, Group], among: list[str]) -> dict[str, Any]:
    """The simplest of those that are as fast as the fastest, within what speeds vary."""
    fastest = max(among, key=lambda key: _speed(groups[key]))

    def ties(key: str) -> bool:
        gap = _speed(groups[fastest]) - _speed(groups[key])
        return gap <= max(_spread(groups[fastest]), _spread(groups[key]))

    tied = [key for key in among if ties(key)]
    chosen = min(tied, key=lambda key: (*complexity(groups[key]), -_speed(groups[key])))
    return {"group": chosen, "fastest": fastest, "tied": tied}


def complexity(group: Group) -> tuple[int, int]:
    """Orders groups from the simplest on: by strategy, then by devices."""
    known = group["strategy"] in SIMPLEST_FIRST
    return (SIMPLEST_FIRST.index(group["strategy"]) if known else len(SIMPLEST_FIRST), group["devices"])


def _speed(group: Group) -> float:
    return group["images_per_second"]["mean"]


def _spread(group: Group) -> float:
    std = group["speed_spread"]["std"]
    return CLOSE_SPEED * _speed(group) if std is None else std
