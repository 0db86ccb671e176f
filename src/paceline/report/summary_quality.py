"""The sentences about quality in a report's summary."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from paceline.report.advice import is_share
from paceline.report.metric_names import format_for, metric_in_text, quality_of, with_spread
from paceline.report.model import Group, Recommendation, Report, WorseGroup
from paceline.report.phrases import at, listed

PLURALS = {"strategy": "strategies", "recipe": "recipes", "run": "runs", "batch": "batch sizes"}
NUMBER_WORDS = {3: "three", 4: "four", 5: "five", 6: "six", 7: "seven", 8: "eight", 9: "nine"}


def quality_sentence(report: Report, advice: Recommendation) -> str:
    """Return which group has the best quality, or that all groups are equally good; empty if it is unknown."""
    if len(report.groups) < 2:
        return ""
    if advice.best is None or advice.worse is None or advice.max_gap is None:
        metric = metric_in_text(report.metric.name).strip()
        missing = f"{metric} was not measured for {labels_of(report, advice.unevaluated)}"
        return f"No recommendation based on quality: {missing if metric else 'quality was not measured'}."
    best = report.groups[advice.best]
    if advice.worse:
        return _best(report, advice, best)
    spec = format_for(report.metric.name, best.selection_metric)
    alike = [report.groups[key] for key in advice.equal_quality]
    who = _everyone(report.subject, len(alike)) if len(alike) == len(report.groups) else listed(g.label for g in alike)
    test = _test_value(report, report.groups[advice.group])
    if not float(format(advice.max_gap, spec)):
        return f"{who} reach {_value(report, best)}{test}."
    ends = [at(spec, "groups", group.id, "selection_metric", "mean") for group in _ends(alike)]
    unit = " %" if is_share(report.metric.name) else ""
    within = ", and the difference is within the spread over seeds" if advice.several_seeds else ""
    return f"{who} reach {_with_metric(report, ' to '.join(ends) + unit)}{within}."


def doubts(report: Report, advice: Recommendation) -> list[str]:
    """Return what a single seed cannot show, and which groups are treated as equally good for that reason."""
    if advice.best is None or advice.several_seeds or len(report.groups) < 2:
        return []
    words = "A single seed cannot show whether differences in quality are significant"
    compared = [group for group in report.groups.values() if group.images_per_second and not group.shares_a_gpu]
    if len({group.family for group in compared}) < len(compared):
        words += ", so rows that differ only in their strategy are treated as equally good"
    return [f"{words}."]


def labels_of(report: Report, keys: Iterable[str]) -> str:
    """Return the labels of groups, separated by commas."""
    return listed(report.groups[key].label for key in keys)


def lower_quality(report: Report, advice: Recommendation) -> list[str]:
    """Return which groups are as good as the best group, and which are not."""
    if not advice.worse:
        return []
    others = [key for key in advice.equal_quality if key != advice.best]
    phrases = [f"As good as the best, given the uncertainty: {labels_of(report, others)}."] if others else []
    verb = "Significantly worse, given the spread over seeds" if advice.several_seeds else "Behind the best"
    return [" ".join([*phrases, f"{verb}: {_worse(report, advice.worse)}."])]


def _best(report: Report, advice: Recommendation, best: Group) -> str:
    value, test = _plain_value(report, best), _test_value(report, best)
    if advice.several_seeds:
        return f"**{best.label}** reaches the best {_metric(report)}: {value}{test}."
    return f"**{best.label}** reaches the best {_metric(report)} observed: {value}{test}."


def _worse(report: Report, worse: Mapping[str, WorseGroup]) -> str:
    """List the lower-quality groups with their gap to the best, and which are faster than the recommended one."""
    assert report.recommendation is not None and report.recommendation.best is not None
    best = report.groups[report.recommendation.best]
    spec = format_for(report.metric.name, best.selection_metric)
    unit = " points" if is_share(report.metric.name) else ""
    ends = [choose(worse, key=lambda key: worse[key].gap) for choose in (min, max)]
    # If the smallest and the largest gap are formatted as the same text, keep only one of them.
    apart = {format(worse[key].gap, spec): key for key in ends}
    gaps = [at(spec, "recommendation", "worse", key, "gap") for key in apart.values()]
    faster = ", ".join(
        f"{labels_of(report, [key])} at {at('.2f', 'recommendation', 'worse', key, 'relative_speed')}× its speed"
        for key, one in worse.items()
        if one.relative_speed > 1
    )
    words = f"{labels_of(report, worse)} (by {' to '.join(gaps)}{unit})"
    return words + (f"; faster than the recommended one: {faster}" if faster else "")


def _ends(groups: Sequence[Group]) -> list[Group]:
    """Return the groups with the smallest and the largest mean of the selection metric."""
    means = {group.id: group.selection_metric.mean for group in groups if group.selection_metric}
    measured = sorted((group for group in groups if group.id in means), key=lambda group: means[group.id])
    return [measured[0], measured[-1]]


def _everyone(subject: str, count: int) -> str:
    noun = PLURALS.get(subject, "combinations")
    return f"Both {noun}" if count == 2 else f"All {NUMBER_WORDS.get(count, count)} {noun}"


def _metric(report: Report) -> str:
    return metric_in_text(report.metric.name)


def _plain_value(report: Report, group: Group) -> str:
    """Return the value of the selection metric for a group, with its unit."""
    name, summary = report.metric.name, group.selection_metric
    value = with_spread(format_for(name, summary), summary, "groups", group.id, "selection_metric")
    return value + (" %" if is_share(name) else "")


def _value(report: Report, group: Group) -> str:
    return _with_metric(report, _plain_value(report, group))


def _with_metric(report: Report, value: str) -> str:
    """Return a phrase such as `90 % validation top-1` or `a train FID of 12`."""
    return f"{value} {_metric(report)}" if is_share(report.metric.name) else f"a {_metric(report)} of {value}"


def _test_value(report: Report, group: Group) -> str:
    """Return the metric on the test split in parentheses, or an empty string if there is none."""
    reported = report.metric.reported
    if reported == report.metric.name or reported not in group.quality:
        return ""
    unit = " %" if is_share(reported) else ""
    return f" ({metric_in_text(reported)}: {quality_of(group, reported)}{unit})"
