"""The summary of a report: the recommendation, then the reasons for it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from paceline.report.advice import complexity, is_share
from paceline.report.content import PARITY
from paceline.report.content_speed import is_superlinear
from paceline.report.metric_names import format_for, metric_in_text, quality_of, with_spread
from paceline.report.model import Group, Recommendation, Report, WorseGroup
from paceline.report.phrases import at, listed
from paceline.report.step_ladder import COSTS


def summarise(report: Report) -> list[str]:
    """Return the paragraphs of the summary as phrases, starting with the recommendation."""
    advice = report.recommendation
    if advice is None:
        requested, done = at("d", "counts", "requested"), at("d", "counts", "done")
        return [f"No recommendation: {done} of {requested} runs finished, and none has a speed that can be compared."]
    phrases = [_advice(report, advice), *_resumed(report), *_quality(report, advice), *_scaling(report)]
    phrases += [*_scaling_costs(report), *_parity(report), *_float64(report)]
    missing = report.counts.missing
    if missing:
        words = "run has" if missing == 1 else "runs have"
        phrases.append(f"{at('d', 'counts', 'missing')} {words} no results; see below for the reasons.")
    return phrases


def _selection_value(report: Report, group: Group) -> str:
    """Return the value of the selection metric for a group."""
    name, summary = report.metric.name, group.selection_metric
    value = with_spread(format_for(name, summary), summary, "groups", group.id, "selection_metric")
    return value + (" %" if is_share(name) else "")


def _labels(report: Report, keys: Iterable[str]) -> str:
    return listed(report.groups[key].label for key in keys)


def _advice(report: Report, advice: Recommendation) -> str:
    chosen = report.groups[advice.group]
    words = f"{at(',.0f', 'groups', chosen.id, 'images_per_second', 'mean')} images per second"
    if len(report.groups) == 1:
        return f"**{chosen.label}** trains at {words}; there is nothing to compare it with."
    if chosen.scaling and chosen.devices > 1:
        words += f", {at('.2f', 'groups', chosen.id, 'scaling', 'speedup')}× the speed of one device"
    words += _tie(report, advice)
    if advice.best is None:
        metric = metric_in_text(report.metric.name).strip()
        missing = f"{metric} was not measured for {_labels(report, advice.unevaluated)}"
        missing = missing if metric else "quality was not measured"
        return f"No recommendation based on quality: {missing}. Based on speed alone, use **{chosen.label}**: {words}."
    return f"Use **{chosen.label}**: {words}{_recommended_quality(report, advice, chosen)}."


def _recommended_quality(report: Report, advice: Recommendation, chosen: Group) -> str:
    """Describe how the recommended group's quality compares with that of others, and its value on the test split."""
    metric, value = metric_in_text(report.metric.name), _selection_value(report, chosen)
    if not advice.several_seeds:
        words = f" ({metric} {value})"
    elif len(advice.equal_quality) == 1:
        words = f", with the best {metric} of all, {value}"
    elif advice.worse:
        words = f" among the rows with the best {metric} ({value})"
    else:
        words = f", and no other is significantly better, given the spread over seeds ({metric} {value})"
    reported = report.metric.reported
    if reported != report.metric.name and reported in chosen.quality:
        unit = " %" if is_share(reported) else ""
        words += f"; its {metric_in_text(reported)} is {quality_of(chosen, reported)}{unit}"
    return words


def _resumed(report: Report) -> list[str]:
    """Describe the runs that were resumed with changes, and which part of each run its numbers come from."""
    phrases = []
    for number, one in enumerate(report.resumed_runs):
        places = [at(",d", "resumed_runs", number, "changes", n, "images") for n in range(len(one.changes))]
        changes = ", then ".join(
            f"at {place} images ({change.changed})" for place, change in zip(places, one.changes, strict=True)
        )
        phrases.append(
            f"`{one.run}` was resumed with changes {changes}. Its speed, efficiency and time per epoch were measured "
            "after the last change. The reported seconds for the whole run also include the time before that."
        )
    return phrases


def _tie(report: Report, advice: Recommendation) -> str:
    """Describe how the speed of the recommended group compares with that of the other candidates."""
    groups = report.groups
    chosen, others = groups[advice.group], [key for key in advice.tied if key != advice.group]
    if not others:
        if advice.best is None:
            return ", the fastest"
        if len(advice.equal_quality) == 1:
            return ""
        faster = any(one.relative_speed > 1 for one in (advice.worse or {}).values())
        return ", the fastest of those with equal quality" if faster and not advice.several_seeds else ", the fastest"
    over = dict.fromkeys(groups[key].speed_spread.over for key in advice.tied)
    known = " and ".join(filter(None, over))
    limit = f"their spread over {known}" if known else "5 %, the spread assumed for a single log interval"
    simplest = any(complexity(groups[key]) != complexity(chosen) for key in others)
    end = ", and it is the simplest of these" if simplest else ""
    return f", a tie with {_labels(report, others)} (the speeds differ by less than {limit}){end}"


def _quality(report: Report, advice: Recommendation) -> list[str]:
    if advice.best is None or advice.max_gap is None or advice.worse is None or len(report.groups) < 2:
        return []
    name, best = report.metric.name, report.groups[advice.best]
    spec = format_for(name, best.selection_metric)
    unit = " points" if is_share(name) else ""
    worse = _worse(report, advice.worse, spec, unit)
    observed = "" if advice.several_seeds else " observed"
    words = f"The best {metric_in_text(name)}{observed} is {_selection_value(report, best)} ({best.label})"
    if len(advice.equal_quality) > 1:
        near = f"within {at(spec, 'recommendation', 'max_gap')}{unit} of it"
        near = near if float(format(advice.max_gap, spec)) else "equal to it"
        others = _labels(report, (key for key in advice.equal_quality if key != advice.best))
        words += f"; {near}: {others}" if worse else f"; all others are {near}"
    if advice.several_seeds:
        which = f": {worse}" if worse else ""
        verdict = "significantly worse" if worse else "no other is significantly worse"
        words += f"; {verdict}, given the spread over seeds{which}"
        return [f"{words}."]
    words += f"; behind the best: {worse}" if worse else ""
    words = f"{words}. A single seed cannot show whether these differences are significant"
    compared = [group for group in report.groups.values() if group.images_per_second and not group.shares_a_gpu]
    if len({group.family for group in compared}) < len(compared):
        words += ", so rows that differ only in their strategy are treated as equally good"
    return [f"{words}."]


def _worse(report: Report, worse: Mapping[str, WorseGroup], spec: str, unit: str) -> str:
    """List the lower-quality groups with their gap to the best, and which are faster than the recommended one."""
    if not worse:
        return ""
    ends = [choose(worse, key=lambda key: worse[key].gap) for choose in (min, max)]
    # If the smallest and the largest gap are formatted as the same text, keep only one of them.
    apart = {format(worse[key].gap, spec): key for key in ends}
    gaps = [at(spec, "recommendation", "worse", key, "gap") for key in apart.values()]
    faster = ", ".join(
        f"{_labels(report, [key])} at {at('.2f', 'recommendation', 'worse', key, 'relative_speed')}× its speed"
        for key, one in worse.items()
        if one.relative_speed > 1
    )
    words = f"{_labels(report, worse)} (by {' to '.join(gaps)}{unit})"
    return words + (f"; faster than the recommended one: {faster}" if faster else "")


def _scaling(report: Report) -> list[str]:
    found = [g for g in report.groups.values() if g.scaling and g.devices > 1 and not g.shares_a_gpu]
    if not found:
        return []
    parts = [f"{listed([g.label])} {at('.0%', 'groups', g.id, 'scaling', 'efficiency')}" for g in found]
    note = " (unusually high: see the note under Speed)" if any(map(is_superlinear, found)) else ""
    return [f"Scaling efficiency of the runs, relative to one device: {', '.join(parts)}{note}."]


def _scaling_costs(report: Report) -> list[str]:
    phrases = []
    for key, ladder in report.scaling_costs.items():
        if ladder.largest_cost:
            cost, remedy = COSTS[ladder.largest_cost]
            gain, efficiency = at(".0%", "scaling_costs", key, "gain"), at(".0%", "scaling_costs", key, "efficiency")
            phrases.append(
                f"A step-time breakdown, measured separately from the runs, shows why {report.groups[key].label} is "
                f"not faster (efficiency in the breakdown: {efficiency}): {cost}. Try {remedy}; this can increase "
                f"throughput by up to {gain}."
            )
    return phrases


def _parity(report: Report) -> list[str]:
    if not report.parity:
        return []
    failed = [recipe for recipe, parity in report.parity.items() if not parity.holds]
    if failed:
        return [
            f"The strategies do **not** agree for {', '.join(failed)}: see “{PARITY}” before you choose a strategy."
        ]
    return [f"The strategies agree: in float64, they produce the same weights ({', '.join(report.parity)})."]


def _float64(report: Report) -> list[str]:
    """Explain why all strategies have equal metrics if all runs use float64."""
    groups = report.groups.values()
    if len({group.strategy for group in groups}) < 2 or {group.precision for group in groups} != {"fp64"}:
        return []
    return [
        "The runs use float64, so equivalent strategies reach equal metrics. In float32, the metrics would differ "
        "slightly, because sums are rounded differently."
    ]
