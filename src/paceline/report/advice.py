"""The answer of a report: the fastest group of runs among those of equal quality, and the summary that explains it.

If several groups are equally fast, the simplest is recommended.
"""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from paceline.report.groups import known_strategy
from paceline.report.model import Group, Recommendation, Report, Run, Summary
from paceline.report.scaling_costs import COSTS
from paceline.report.wording import format_of, is_share, listed, metric_in_text, metric_with_spread

CLOSE_QUALITY = 0.02  # if there is only one seed, metrics that differ by less than this fraction count as equal
CLOSE_SPEED = 0.05  # assumed relative spread of a speed if the actual spread is unknown
STANDARD_ERRORS = 2
PARITY = "Do all strategies produce the same weights?"  # title of the section with the differences


class _Quality(NamedTuple):
    """The quality of a group of runs, with its uncertainty."""

    mean: float
    error: float  # standard error from the spread across seeds and the number of evaluated samples


def recommend(groups: Mapping[str, Group], metric: str, mode: str) -> Recommendation | None:
    """Recommend a group of runs, and list the groups that are equally fast and those of lower quality.

    Quality is measured by `metric`, which selected the checkpoints. Results on the test split are not used. If some
    groups have no value for `metric`, `best` is None, `unevaluated` lists these groups, and only the speed counts.
    Groups whose speed is unknown, or was not measured on separate devices, are left out.
    """
    speeds = {
        key: one.images_per_second.mean for key, one in groups.items() if one.images_per_second and not one.shares_a_gpu
    }
    if not speeds:
        return None
    values = {key: value for key in speeds if (value := groups[key].selection_metric) is not None}
    unevaluated = [key for key in speeds if key not in values]
    if unevaluated:
        chosen, tied = _choose(groups, speeds)
        return Recommendation(chosen, tied, None, [], {}, several_seeds=False, unevaluated=unevaluated)
    sign = 1 if mode == "max" else -1
    several_seeds = all(value.n > 1 for value in values.values())
    best = max(values, key=lambda key: sign * values[key].mean)
    qualities = {}
    for key in values:
        alike = [key] if several_seeds else [other for other in values if groups[other].family == groups[key].family]
        qualities[key] = _quality(groups[key], [values[one] for one in alike], metric, several_seeds)
    limits = {key: STANDARD_ERRORS * max(one.error, qualities[best].error) for key, one in qualities.items()}
    equal = [key for key, one in qualities.items() if sign * (qualities[best].mean - one.mean) <= limits[key]]
    chosen, tied = _choose(groups, {key: speeds[key] for key in equal})
    gaps = {key: sign * (values[best].mean - value.mean) for key, value in values.items() if key not in equal}
    return Recommendation(chosen, tied, best, equal, gaps, several_seeds, unevaluated=[])


def _quality(group: Group, alike: Sequence[Summary], metric: str, several_seeds: bool) -> _Quality:
    """Return the quality of a group: the mean of `alike` or, if a group has only one seed, of its family.

    The groups of a family differ only in strategy and number of devices. Strategies produce the same weights up to
    rounding, so differences within a family are due to chance.
    """
    mean = statistics.fmean(summary.mean for summary in alike)
    errors = [summary.std for summary in alike if summary.std is not None]
    if not several_seeds:
        errors.append(CLOSE_QUALITY * abs(mean) / STANDARD_ERRORS)
        errors += [statistics.stdev(summary.mean for summary in alike)] if len(alike) > 1 else []
    if is_share(metric) and group.num_evaluated:
        errors.append(_binomial_error(mean, group.num_evaluated))
    return _Quality(mean, max(errors))


def _binomial_error(percentage: float, samples: float) -> float:
    """Return the standard error of a percentage.

    Adding one hit and one miss keeps the error above zero at 0 % and 100 %.
    """
    share = (percentage / 100 * samples + 1) / (samples + 2)
    return 100 * math.sqrt(share * (1 - share) / samples)


def _choose(groups: Mapping[str, Group], speeds: Mapping[str, float]) -> tuple[str, list[str]]:
    """Return the simplest of the groups that are as fast as the fastest, within their spread, and all of these."""
    fastest = max(speeds, key=lambda key: speeds[key])
    spreads = {key: groups[key].speed_spread.std for key in speeds}
    known = {key: CLOSE_SPEED * speeds[key] if std is None else std for key, std in spreads.items()}
    tied = [key for key in speeds if speeds[fastest] - speeds[key] <= max(known[fastest], known[key])]
    return min(tied, key=lambda key: (*_complexity(groups[key]), -speeds[key])), tied


def _complexity(group: Group) -> tuple[int, int]:
    """Return a sort key for groups: simple strategies first, unknown strategies last, then by number of devices."""
    strategy = known_strategy(group.strategy)
    return (sys.maxsize if strategy is None else strategy.complexity, group.devices)


def summarise(report: Report) -> list[str]:
    """Return the paragraphs of the summary, starting with the recommendation."""
    advice, counts = report.recommendation, report.counts
    if advice is None:
        done = f"{counts['done']} of {counts['requested']} runs finished"
        return [f"No recommendation: {done}, and none has a speed that can be compared."]
    paragraphs = [" ".join(filter(None, [_quality_sentence(report, advice), _speed_sentence(report, advice)]))]
    if advice.worse:
        verb = "Significantly worse, given the spread over seeds" if advice.several_seeds else "Behind the best"
        paragraphs.append(f"{verb}: {_list_worse(report, advice)}.")
    if advice.best and not advice.several_seeds and len(report.groups) > 1:
        paragraphs.append(
            "A single seed cannot show whether differences in quality are significant, so rows that differ only in "
            "their strategy are treated as equally good."
        )
    paragraphs += [busy_sentence(report.groups), *map(_describe_resume, report.runs.values())]
    paragraphs += [_scaling_sentence(report), _parity_sentence(report)]
    if missing := counts["missing"]:
        paragraphs.append(
            f"{missing} run{' has' if missing == 1 else 's have'} no results; the report lists the reasons."
        )
    return [paragraph for paragraph in paragraphs if paragraph]


def _quality_sentence(report: Report, advice: Recommendation) -> str:
    """Return which group has the best quality, or that all groups are equally good."""
    groups, name = report.groups, report.metric.name
    if len(groups) < 2:
        return ""
    if advice.best is None:
        missing = f"{metric_in_text(name)} was not measured for {_labels(report, advice.unevaluated)}"
        return f"No recommendation based on quality: {missing if name else 'quality was not measured'}."
    best, unit = groups[advice.best], " %" if is_share(name) else ""
    if advice.worse:
        value = metric_with_spread(name, best.selection_metric)
        test = report.metric.reported
        tested = f" ({metric_in_text(test)}: {metric_with_spread(test, best.quality.get(test))}{unit})"
        return (
            f"**{best.label}** reaches the best {metric_in_text(name)}: {value}{unit}{tested if test != name else ''}."
        )
    means = sorted(one.mean for key in advice.equal_quality if (one := groups[key].selection_metric))
    ends = dict.fromkeys(f"{mean:{format_of(name, means[-1])}}" for mean in (means[0], means[-1]))
    who = f"All {len(means)} rows" if len(means) == len(groups) else _labels(report, advice.equal_quality)
    return f"{who} reach a {metric_in_text(name)} of {' to '.join(ends)}{unit}."


def _speed_sentence(report: Report, advice: Recommendation) -> str:
    """Return which group to use, how fast it is, and which others are as fast."""
    chosen = report.groups[advice.group]
    assert chosen.images_per_second
    speed = f"{chosen.images_per_second.mean:,.0f} images per second"
    if len(report.groups) == 1:
        return f"**{chosen.label}** trains at {speed}; there is nothing to compare it with."
    if chosen.scaling and chosen.devices > 1:
        speed += f", {chosen.scaling.speedup:.2f}× the speed of one device"
    others = [key for key in advice.tied if key != advice.group]
    use = "Based on speed alone, use" if advice.best is None else "Use"
    if others:
        tied = f"as fast, given the spread of the speeds, are {_labels(report, others)}"
        return f"{use} **{chosen.label}**: it trains at {speed}, and it is the simplest; {tied}."
    rank = "the fastest of those with equal quality" if advice.worse else "the fastest"
    return f"{use} **{chosen.label}**: it trains at {speed}, {rank}."


def _list_worse(report: Report, advice: Recommendation) -> str:
    """List the groups of lower quality, each with its gap to the best and its speed."""
    assert advice.best is not None
    unit = " points" if is_share(report.metric.name) else ""
    best = report.groups[advice.best].selection_metric
    spec = format_of(report.metric.name, best.mean if best else None)
    worse = [(report.groups[key], gap) for key, gap in advice.worse.items()]
    return ", ".join(
        f"{listed([group.label])} by {gap:{spec}}{unit}{_relative_speed(report, group)}" for group, gap in worse
    )


def _relative_speed(report: Report, group: Group) -> str:
    """Return the speed of a group that is faster than the recommended one; empty for any other group."""
    assert report.recommendation is not None
    chosen = report.groups[report.recommendation.group].images_per_second
    if not chosen or not group.images_per_second or group.images_per_second.mean <= chosen.mean:
        return ""
    return f" ({group.images_per_second.mean / chosen.mean:.2f}× as fast as the recommended one)"


def _scaling_sentence(report: Report) -> str:
    """Return the speed of each group on several devices relative to one device, and its largest cost."""
    parts = []
    for key, group in report.groups.items():
        if group.scaling is None or group.devices == 1 or group.shares_a_gpu:
            continue
        text = f"{listed([group.label])} {group.scaling.speedup:.2f}×"
        if _is_within_spread(group, report.groups[group.scaling.baseline]):
            text += ", which is within the spread"
        if (costs := report.scaling_costs.get(key)) and costs.largest_cost:
            text += f" (largest cost: {COSTS[costs.largest_cost][0]})"
        parts.append(text)
    return f"Speed relative to one device: {'; '.join(parts)}." if parts else ""


def _is_within_spread(group: Group, alone: Group) -> bool:
    if group.images_per_second is None or alone.images_per_second is None:
        return False
    gap = abs(group.images_per_second.mean - alone.images_per_second.mean)
    return gap <= max(one.speed_spread.std or 0.0 for one in (group, alone))


def busy_sentence(groups: Mapping[str, Group]) -> str:
    """Return a warning if the machine was busy while speeds were measured; otherwise an empty string."""
    busy = [group for group in groups.values() if group.was_busy]
    if not busy:
        return ""
    load = max(group.load_average or 0.0 for group in busy)
    who = "all rows" if len(busy) == len(groups) else listed(group.label for group in busy)
    return (
        f"The machine was busy while the speed was measured (load average up to {load:.1f}, more than the number of "
        f"cores), so the speeds may be too low: {who}. Repeat the comparison on an idle machine."
    )


def _describe_resume(run: Run) -> str:
    """Describe a run that was resumed with changes, and which part of it its numbers come from."""
    if not run.segment_changes:
        return ""
    changes = ", then ".join(f"at {change.images:,} images ({change.changed})" for change in run.segment_changes)
    return (
        f"`{run.folder}` was resumed with changes {changes}. Its speed, efficiency and time per epoch were measured "
        "after the last change. The reported seconds for the whole run also include the time before that."
    )


def _parity_sentence(report: Report) -> str:
    failed = [recipe for recipe, parity in report.parity.items() if not parity.holds]
    if failed:
        return f"The strategies do **not** agree for {', '.join(failed)}: see “{PARITY}” before you choose a strategy."
    agree = f"The strategies agree: in float64, they produce the same weights ({', '.join(report.parity)})."
    return agree if report.parity else ""


def _labels(report: Report, keys: Iterable[str]) -> str:
    return listed(report.groups[key].label for key in keys)
