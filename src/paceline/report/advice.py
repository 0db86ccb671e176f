"""The answer of a report: the fastest group of runs among those of equal quality, and the summary that explains it.

If several groups are equally fast, the simplest is recommended.
"""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, pairwise

from paceline.contracts.step_ladder import StepLadder
from paceline.report.groups import known_strategy
from paceline.report.model import (
    Explanation,
    Group,
    Recommendation,
    Report,
    Rung,
    Summary,
    format_of,
    is_share,
    listed,
    metric_in_text,
    metric_with_spread,
)

CLOSE_QUALITY = 0.02  # if there is only one seed, metrics that differ by less than this fraction count as equal
CLOSE_SPEED = 0.05  # assumed relative spread of a speed if the actual spread is unknown
STANDARD_ERRORS = 2
PARITY = "Do all strategies produce the same weights?"  # title of the section with the differences


def recommend(groups: Mapping[str, Group], metric: str, mode: str) -> Recommendation | None:
    """Recommend a group of runs, and list the groups that are equally fast and those of lower quality.

    Quality is measured by `metric`, which selected the checkpoints. Results on the test split are not used. If some
    groups have no value for `metric`, `best` is None, `unevaluated` lists these groups, and only the speed counts.
    Groups whose speed is unknown, or was not measured on separate devices, are left out.
    """
    speeds = {
        key: group.images_per_second.mean
        for key, group in groups.items()
        if group.images_per_second and not group.shares_a_gpu
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
        qualities[key] = _quality(groups[key], [values[other] for other in alike], metric, several_seeds)
    equal = [
        key
        for key, (mean, error) in qualities.items()
        if sign * (qualities[best][0] - mean) <= STANDARD_ERRORS * max(error, qualities[best][1])
    ]
    chosen, tied = _choose(groups, {key: speeds[key] for key in equal})
    gaps = {key: sign * (values[best].mean - value.mean) for key, value in values.items() if key not in equal}
    return Recommendation(chosen, tied, best, equal, gaps, several_seeds, unevaluated=[])


def _quality(group: Group, alike: Sequence[Summary], metric: str, several_seeds: bool) -> tuple[float, float]:
    """Return the quality of a group and its error: of `alike` or, if a group has only one seed, of its family.

    The groups of a family differ only in strategy and number of devices. Strategies produce the same weights up to
    rounding, so differences within a family are due to chance.
    """
    mean = statistics.fmean(summary.mean for summary in alike)
    errors = [summary.std for summary in alike if summary.std is not None]
    if not several_seeds:
        errors.append(CLOSE_QUALITY * abs(mean) / STANDARD_ERRORS)
        errors += [statistics.stdev(summary.mean for summary in alike)] if len(alike) > 1 else []
    if is_share(metric) and group.num_evaluated:
        # The standard error of a percentage; one more hit and one more miss keep it above zero at 0 % and 100 %.
        share = (mean / 100 * group.num_evaluated + 1) / (group.num_evaluated + 2)
        errors.append(100 * math.sqrt(share * (1 - share) / group.num_evaluated))
    return mean, max(errors)


def _choose(groups: Mapping[str, Group], speeds: Mapping[str, float]) -> tuple[str, list[str]]:
    """Return the simplest of the groups that are as fast as the fastest, within their spread, and all of these."""
    fastest = max(speeds, key=lambda key: speeds[key])
    spreads = {key: groups[key].speed_std for key in speeds}
    known = {key: CLOSE_SPEED * speeds[key] if std is None else std for key, std in spreads.items()}
    tied = [key for key in speeds if speeds[fastest] - speeds[key] <= max(known[fastest], known[key])]
    return min(tied, key=lambda key: (*_complexity(groups[key]), -speeds[key])), tied


def _complexity(group: Group) -> tuple[int, int]:
    """Return a sort key for groups: simple strategies first, unknown strategies last, then by number of devices."""
    strategy = known_strategy(group.strategy)
    return (sys.maxsize if strategy is None else strategy.complexity, group.devices)


def summarise(report: Report) -> list[str]:
    """Return the paragraphs of the summary, starting with the recommendation."""
    advice, missing = report.recommendation, report.counts["missing"]
    if advice is None:
        done = f"{report.counts['done']} of {report.counts['requested']} runs finished"
        return [f"No recommendation: {done}, and none has a speed that can be compared."]
    paragraphs = [" ".join(filter(None, [_quality_sentence(report, advice), _speed_sentence(report, advice)]))]
    if advice.worse:
        unit = " points" if is_share(report.metric.name) else ""
        spec = format_of(report.metric.name, max(advice.worse.values()))
        gaps = [f"{listed([report.groups[key].label])} by {gap:{spec}}{unit}" for key, gap in advice.worse.items()]
        verb = "Significantly worse, given the spread over seeds" if advice.several_seeds else "Behind the best"
        paragraphs.append(f"{verb}: {', '.join(gaps)}.")
    if advice.best and not advice.several_seeds and len(report.groups) > 1:
        paragraphs.append(
            "A single seed cannot show whether differences in quality are significant, so rows that differ only in "
            "their strategy are treated as equally good."
        )
    paragraphs += [_scaling_sentence(report), _parity_sentence(report)]
    if missing:
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
        return f"**{best.label}** reaches the best {metric_in_text(name)}: {value}{unit}."
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
    use = "Based on speed alone, use" if advice.best is None else "Use"
    if others := [key for key in advice.tied if key != advice.group]:
        tied = f"as fast, given the spread of the speeds, are {_labels(report, others)}"
        return f"{use} **{chosen.label}**: it trains at {speed}, and it is the simplest; {tied}."
    rank = "the fastest of those with equal quality" if advice.worse else "the fastest"
    return f"{use} **{chosen.label}**: it trains at {speed}, {rank}."


def _scaling_sentence(report: Report) -> str:
    """Return the speed of each group on several devices relative to one device, and its largest cost."""
    parts = []
    for key, group in report.groups.items():
        if group.scaling is None or group.devices == 1 or group.shares_a_gpu:
            continue
        costs = report.scaling_costs.get(key)
        cost = f" (largest cost: {COSTS[costs.largest_cost][0]})" if costs and costs.largest_cost else ""
        parts.append(f"{listed([group.label])} {group.scaling.speedup:.2f}×{cost}")
    return f"Speed relative to one device: {'; '.join(parts)}." if parts else ""


def _parity_sentence(report: Report) -> str:
    failed = [recipe for recipe, parity in report.parity.items() if not parity.holds]
    if failed:
        return f"The strategies do **not** agree for {', '.join(failed)}: see “{PARITY}” before you choose a strategy."
    agree = f"The strategies agree: in float64, they produce the same weights ({', '.join(report.parity)})."
    return agree if report.parity else ""


def _labels(report: Report, keys: Iterable[str]) -> str:
    return listed(report.groups[key].label for key in keys)


# What keeps N devices from being N times as fast: the cost that each rung of a step ladder adds, and a remedy.
COSTS: dict[str, tuple[str, str]] = {
    "part": (
        "a smaller batch per device uses the device less efficiently",
        "a larger batch (with --scale-lr), or fewer devices",
    ),
    "together": (
        "devices that run at the same time slow each other down (memory, cores, power)",
        "fewer processes on this host, or more cores per process",
    ),
    "eager": (
        "the step is launched kernel by kernel instead of as one CUDA graph",
        "--strategy single, whose step can be captured as a graph",
    ),
    "gradients": (
        "gradients are exchanged between devices",
        "a larger batch per device, --accumulate 2, or a faster link between devices",
    ),
    "batchnorm": (
        "BatchNorm waits for statistics from all devices",
        "--sync-batchnorm off (this changes the trained weights, so check the quality), or networks without BatchNorm",
    ),
    "loading": ("the step waits for data", "--loader resident if the data fits in memory, or more --workers"),
}


def explain(ladder: StepLadder, weak: bool = False) -> Explanation:
    """Return the cost that each rung of a step ladder adds.

    The first rung is N times the speed of one device, and the last rung is the complete training step. If the runs
    use the same batch per device (`weak`), the first rung is based on one device with its slice of the batch.
    """
    names = [rung.name for rung in ladder.rungs]
    first = names.index("part") if weak and "part" in names else 0
    # The speed of the rung "part" already includes the slices of all devices.
    times = ladder.devices if first == 0 else 1
    measured = [("ideal", times * ladder.rungs[first].images_per_second)]
    measured += [(rung.name, rung.images_per_second) for rung in ladder.rungs[first + 1 :]]
    # Each rung includes the costs of the rungs before it, so only noise can make a rung slower than a later one.
    seconds = list(accumulate((1 / speed for _, speed in reversed(measured)), min))
    added = [after - before for before, after in pairwise([*reversed(seconds)])]
    rungs = [Rung(*measured[0])] + [
        Rung(name, speed, share=cost / seconds[0], gain=seconds[0] / (seconds[0] - cost) - 1)
        for (name, speed), cost in zip(measured[1:], added, strict=True)
    ]
    largest = max(rungs[1:], key=lambda rung: rung.share)
    return Explanation(
        devices=ladder.devices,
        weak=weak,
        rungs=rungs,
        largest_cost=largest.name if largest.share else None,
        gain=largest.gain,
        efficiency=rungs[-1].images_per_second / rungs[0].images_per_second,
    )
