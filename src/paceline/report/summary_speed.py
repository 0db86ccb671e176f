"""The sentences about speed in a report's summary."""

from __future__ import annotations

from collections.abc import Collection

from paceline.report.advice import complexity
from paceline.report.content_speed import is_superlinear
from paceline.report.model import Group, Recommendation, Report
from paceline.report.phrases import at, listed
from paceline.report.step_ladder import COSTS
from paceline.report.summary_quality import labels_of

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
