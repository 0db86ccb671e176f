"""The summary of a report: the answer first, then the reasons for it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from paceline.report.advice import complexity, is_share
from paceline.report.content import PARITY, busy_sentences, is_superlinear
from paceline.report.model import COSTS, Group, Recommendation, Report, WorseGroup
from paceline.report.parts import at, format_for, listed, metric_in_text, quality_of, with_spread

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


SAME_SPEED = 0.05  # speeds that differ by less than this fraction count as the same
MAX_EXPLAINED = 4  # maximum number of groups whose scaling the summary explains


def speed_sentence(report: Report, advice: Recommendation) -> str:
    """Return which group to use, and how fast it is."""
    chosen = report.groups[advice.group]
    speed = f"{at(',.0f', 'groups', chosen.id, 'images_per_second', 'mean')} images per second"
    if len(report.groups) == 1:
        return f"**{chosen.label}** trains at {speed}; there is nothing to compare it with."
    if chosen.scaling and chosen.devices > 1:
        speed += f", {at('.2f', 'groups', chosen.id, 'scaling', 'speedup')}× the speed of one device"
    use = "Based on speed alone, use" if advice.best is None else "Use"
    return f"{use} **{chosen.label}**: it trains at {speed}{_rank(advice)}."


def reason_not_to_use_more(report: Report, advice: Recommendation) -> str:
    """Return why several devices are not faster, if one device is recommended; otherwise an empty string."""
    chosen = report.groups[advice.group]
    slower = [group for group in _scaled(report) if group.scaling and group.scaling.baseline == chosen.id]
    slower = [group for group in slower if group.scaling and group.scaling.speedup < 1 - SAME_SPEED]
    slower = [group for group in slower if group.id not in advice.tied]
    if chosen.devices > 1 or not slower:
        return ""
    speeds = [at(".2f", "groups", group.id, "scaling", "speedup") + "×" for group in slower]
    words = f"On this machine, {listed(group.label for group in slower)} {'is' if len(slower) == 1 else 'are'} slower"
    words += f" than one device ({', '.join(speeds)} the speed)"
    costs = [_cost(report, group) for group in slower]
    known = list(dict.fromkeys(cost for cost in costs if cost))
    return f"{words}, because {known[0]}." if len(known) == 1 else f"{words}."


def scaling_sentences(report: Report) -> list[str]:
    """Return one paragraph per group on several devices: its speedup, the largest cost and a remedy."""
    found = _scaled(report)
    phrases = []
    explained: set[str] = set()
    for group in found[:MAX_EXPLAINED]:
        phrases.append(_scaling_sentence(report, group, explained))
        explained.add(_cost(report, group))
    if len(found) > MAX_EXPLAINED:
        others = found[MAX_EXPLAINED:]
        rest = [f"{listed([g.label])} {at('.2f', 'groups', g.id, 'scaling', 'speedup')}×" for g in others]
        phrases.append(f"Speed relative to one device: {', '.join(rest)}.")
    return phrases


def _scaling_sentence(report: Report, group: Group, explained: Collection[str]) -> str:
    """Return a group's speedup and its largest cost, with a remedy unless that cost was `explained` before."""
    assert group.scaling is not None
    speedup = at(".2f", "groups", group.id, "scaling", "speedup")
    efficiency = at(".0%", "groups", group.id, "scaling", "efficiency")
    if _within_spread(report, group):
        words = f"**{group.label}** does not gain: it is as fast as one device, given the spread of both ({speedup}×)"
    elif group.scaling.speedup > 1 + SAME_SPEED:
        words = f"**{group.label}** gains: it trains {speedup}× as fast as one device (efficiency {efficiency})"
    elif group.scaling.speedup < 1 - SAME_SPEED:
        words = f"**{group.label}** does not gain: it trains at {speedup}× the speed of one device"
    else:
        words = f"**{group.label}** does not gain: it is as fast as one device ({speedup}×)"
    words += " (unusually high: see the note under Speed)." if is_superlinear(group) else "."
    cost = _cost(report, group)
    if cost and cost in explained:
        words += f" Its largest cost is also that {cost}."
    elif cost:
        _, remedy = COSTS[report.scaling_costs[group.id].largest_cost or ""]
        share = at(".0%", "scaling_costs", group.id, "efficiency")
        gain = at(".0%", "scaling_costs", group.id, "gain")
        words += (
            f" A separate step-time breakdown (efficiency {share}) shows the largest cost: {cost}. "
            f"Try {remedy}; this can increase throughput by up to {gain}."
        )
    return words


def _within_spread(report: Report, group: Group) -> bool:
    """Return whether the speeds of a group and of one device differ by at most the larger standard deviation."""
    assert group.scaling is not None
    alone = report.groups[group.scaling.baseline]
    if group.images_per_second is None or alone.images_per_second is None:
        return False
    gap = abs(group.images_per_second.mean - alone.images_per_second.mean)
    return gap <= max(one.speed_spread.std or 0.0 for one in (group, alone))


def _scaled(report: Report) -> list[Group]:
    return [group for group in report.groups.values() if group.scaling and group.devices > 1 and not group.shares_a_gpu]


def _cost(report: Report, group: Group) -> str:
    """Return the largest cost in a group's step-time breakdown, or an empty string if it is unknown."""
    ladder = report.scaling_costs.get(group.id)
    return COSTS[ladder.largest_cost][0] if ladder and ladder.largest_cost else ""


def tie_sentence(report: Report, advice: Recommendation) -> list[str]:
    """Return which groups are as fast as the recommended one, and why it is recommended nevertheless."""
    groups = report.groups
    chosen, others = groups[advice.group], [key for key in advice.tied if key != advice.group]
    if not others:
        return []
    over = dict.fromkeys(groups[key].speed_spread.over for key in advice.tied)
    known = " and ".join(filter(None, over))
    limit = f"their spread over {known}" if known else "5 %, the spread assumed for a single log interval"
    simplest = any(complexity(groups[key]) != complexity(chosen) for key in others)
    end = f" **{chosen.label}** is recommended because it is the simplest of these." if simplest else ""
    verb = "is" if len(others) == 1 else "are"
    start = f"{labels_of(report, others)} {verb} as fast as **{chosen.label}**"
    return [f"{start}: the speeds differ by less than {limit}.{end}"]


def _rank(advice: Recommendation) -> str:
    """Return whether the recommended group is the fastest of all or only of those with equal quality."""
    if len(advice.tied) > 1 or (advice.best is not None and len(advice.equal_quality) == 1):
        return ""
    faster = any(one.relative_speed > 1 for one in (advice.worse or {}).values())
    return ", the fastest of those with equal quality" if faster else ", the fastest"


def summarise(report: Report) -> list[str]:
    """Return the paragraphs of the summary as phrases, starting with the recommendation."""
    advice = report.recommendation
    if advice is None:
        requested, done = at("d", "counts", "requested"), at("d", "counts", "done")
        return [f"No recommendation: {done} of {requested} runs finished, and none has a speed that can be compared."]
    answer = [quality_sentence(report, advice), speed_sentence(report, advice), reason_not_to_use_more(report, advice)]
    phrases = [" ".join(filter(None, answer)), *tie_sentence(report, advice), *lower_quality(report, advice)]
    phrases += [
        *doubts(report, advice),
        *_busy(report),
        *_resumed(report),
        *scaling_sentences(report),
        *_parity(report),
        *_float64(report),
    ]
    missing = report.counts.missing
    if missing:
        words = "run has" if missing == 1 else "runs have"
        phrases.append(f"{at('d', 'counts', 'missing')} {words} no results; the report lists the reasons.")
    return phrases


def _busy(report: Report) -> list[str]:
    """Warn that the machine was busy, so that the speeds may change on an idle machine."""
    sentences = busy_sentences(report.groups)
    remedy = "Repeat the comparison on an idle machine before you rely on the speeds."
    return [f"{sentences[0]} {remedy}"] if sentences else []


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
