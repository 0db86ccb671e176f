"""The summary: the recommendation first, then what it rests on."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from paceline.report.advice import complexity, is_share
from paceline.report.content import agrees
from paceline.report.content_speed import is_beyond
from paceline.report.losses import STEPS
from paceline.report.metric_words import digits_for, metric_said, quality_of, with_spread
from paceline.report.phrases import at, listed

Report = dict[str, Any]


def summarise(report: Report) -> list[str]:
    """Sentences, the recommendation first."""
    groups, advice = report["groups"], report["recommendation"]
    if not groups or advice is None:
        wanted, ended = at("d", "counts", "wanted"), at("d", "counts", "done")
        return [f"No recommendation: of {wanted} runs, {ended} ended with numbers that can be compared."]
    said = [_advice(report), *_went_on(report), *_quality(report), *_scaling(report), *_why(report), *_parity(report)]
    said += _rounding(report)
    left = report["counts"]["left"]
    if left:
        words = "run has" if left == 1 else "runs have"
        said.append(f"{at('d', 'counts', 'left')} {words} no numbers; the reasons are below.")
    return said


def _judged(report: Report, group: dict[str, Any]) -> str:
    """The group's value of the metric that chose its checkpoint."""
    name, summary = report["metric"]["name"], group["chosen_by"]
    value = with_spread(digits_for(name, summary), summary, "groups", group["id"], "chosen_by")
    return value + (" %" if is_share(name) else "")


def _labels(report: Report, keys: Iterable[str]) -> str:
    return listed(report["groups"][key]["label"] for key in keys)


def _advice(report: Report) -> str:
    groups, advice = report["groups"], report["recommendation"]
    chosen = groups[advice["group"]]
    words = f"{at(',.0f', 'groups', advice['group'], 'images_per_second', 'mean')} images per second"
    if len(groups) == 1:
        return f"**{chosen['label']}** trains at {words}; there is nothing to compare it with."
    if chosen["scaling"] and chosen["devices"] > 1:
        words += f", {at('.2f', 'groups', chosen['id'], 'scaling', 'speedup')}× one device"
    words += _tie(report)
    metric = metric_said(report["metric"]["name"])
    if advice["best"] is None:
        missing = f"{metric} of {_labels(report, advice['unjudged'])}" if metric.strip() else "quality"
        return (
            f"No recommendation by quality: no {missing} was measured. By speed alone, **{chosen['label']}**: {words}."
        )
    value = _judged(report, chosen)
    if not advice["by_seeds"]:
        words += f" ({metric} {value})"
    elif len(advice["equal"]) == 1:
        words += f", and the best {metric} of all, {value}"
    elif advice["behind"]:
        words += f", of those with a good {metric} ({value})"
    else:
        words += f", and none is worse beyond its seeds ({metric} {value})"
    shown = report["metric"]["shown"]
    if shown != report["metric"]["name"] and shown in chosen["quality"]:
        unit = " %" if is_share(shown) else ""
        words += f"; its {metric_said(shown)} is {quality_of(chosen, shown)}{unit}"
    return f"Use **{chosen['label']}**: {words}."


def _went_on(report: Report) -> list[str]:
    """Which runs were not one way throughout, and what their numbers are then of."""
    said = []
    for number, one in enumerate(report["went_on"]):
        places = [at(",d", "went_on", number, "at", n, "images") for n in range(len(one["at"]))]
        told = ", then ".join(
            f"at {place} images ({change['changed']})" for place, change in zip(places, one["at"], strict=True)
        )
        said.append(
            f"`{one['run']}` went on in another way {told}: its speed, efficiency and seconds an epoch are of what "
            "came last, its seconds a run of all."
        )
    return said


def _compared(report: Report) -> list[dict[str, Any]]:
    return [g for g in report["groups"].values() if g["images_per_second"] and not g["shares_a_gpu"]]


def _tie(report: Report) -> str:
    """How the choice's speed stands among those that it was chosen from."""
    groups, advice = report["groups"], report["recommendation"]
    chosen, others = groups[advice["group"]], [key for key in advice["tied"] if key != advice["group"]]
    if not others:
        if advice["best"] is None:
            return ", the fastest"
        if len(advice["equal"]) == 1:
            return ""
        faster = any(one["speed"] > 1 for one in advice["behind"].values())
        return ", the fastest of those as good" if faster and not advice["by_seeds"] else ", the fastest"
    over = list(dict.fromkeys(groups[key]["speed_spread"]["over"] for key in advice["tied"]))
    known = " and ".join(filter(None, over))
    how = f"speeds vary over {known}" if known else "5 %, and one logged stretch says nothing of how speeds vary"
    simplest = any(complexity(groups[key]) != complexity(chosen) for key in others)
    end = ", and it is the simplest" if simplest else ""
    return f", a tie with {_labels(report, others)} (they differ by less than {how}){end}"


def _quality(report: Report) -> list[str]:
    advice, groups = report["recommendation"], report["groups"]
    if advice["best"] is None or len(groups) < 2:
        return []
    name, best = report["metric"]["name"], groups[advice["best"]]
    spec = digits_for(name, best["chosen_by"])
    unit = " points" if is_share(name) else ""
    behind = _behind(report, spec, unit)
    seen = "" if advice["by_seeds"] else " seen"
    words = f"The best {metric_said(name)}{seen} is {_judged(report, best)}, of {best['label']}"
    if len(advice["equal"]) > 1:
        near = f"within {at(spec, 'recommendation', 'within')}{unit} of it"
        near = near if float(format(advice["within"], spec)) else "equal to it"
        words += f"; {_labels(report, (k for k in advice['equal'] if k != advice['best'])) if behind else 'all'} {near}"
    if advice["by_seeds"]:
        words += (
            f"; worse beyond what the seeds explain: {behind}" if behind else "; no other is worse beyond its seeds"
        )
        return [f"{words}."]
    words += f"; behind: {behind}" if behind else ""
    told = f"{words}. One seed cannot tell whether another one would agree"
    alike = len({group["family"] for group in _compared(report)}) < len(_compared(report))
    told += "; rows that differ in their strategy alone are taken as equally good" if alike else ""
    return [f"{told}."]


def _behind(report: Report, spec: str, unit: str) -> str:
    """Which rows are behind the best in quality, how far, and which of them are faster than the one to use."""
    behind = report["recommendation"]["behind"]
    if not behind:
        return ""
    ends = [choose(behind, key=lambda key: behind[key]["gap"]) for choose in (min, max)]
    apart = {format(behind[key]["gap"], spec): key for key in ends}  # one where they read the same
    gaps = [at(spec, "recommendation", "behind", key, "gap") for key in apart.values()]
    faster = ", ".join(
        f"{_labels(report, [key])} at {at('.2f', 'recommendation', 'behind', key, 'speed')}× its speed"
        for key, one in behind.items()
        if one["speed"] > 1
    )
    told = f"{_labels(report, behind)} (by {' to '.join(gaps)}{unit})"
    return told + (f"; faster than the one to use: {faster}" if faster else "")


def _scaling(report: Report) -> list[str]:
    found = [g for g in report["groups"].values() if g["scaling"] and g["devices"] > 1 and not g["shares_a_gpu"]]
    if not found:
        return []
    parts = [f"{listed([g['label']])} {at('.0%', 'groups', g['id'], 'scaling', 'efficiency')}" for g in found]
    doubt = " (more than devices can give: see the note under Speed)" if any(map(is_beyond, found)) else ""
    return [f"Scaling efficiency against one device, of the runs: {', '.join(parts)}{doubt}."]


def _why(report: Report) -> list[str]:
    said = []
    for key, ladder in report["why_not"].items():
        if ladder["largest"]:
            cause, fix = STEPS[ladder["largest"]]
            gain = at("+.0%", "why_not", key, "gain")
            efficiency = at(".0%", "why_not", key, "efficiency")
            said.append(
                f"Why {report['groups'][key]['label']} is not faster, by steps measured apart from the runs "
                f"(efficiency {efficiency} there): {cause}. Try {fix} ({gain} at most)."
            )
    return said


def _parity(report: Report) -> list[str]:
    if not report["parity"]:
        return []
    failed = [recipe for recipe, parity in report["parity"].items() if not agrees(parity)]
    names = ", ".join(report["parity"])
    if failed:
        return [
            f"Strategies do **not** agree for {', '.join(failed)}: see “The same weights?” before using any of them."
        ]
    return [f"Strategies agree: in float64 they give the same weights ({names})."]


def _rounding(report: Report) -> list[str]:
    """Why strategies end alike to the last digit, where float64 is the reason."""
    groups = report["groups"].values()
    if len({group["strategy"] for group in groups}) < 2 or {group["precision"] for group in groups} != {"fp64"}:
        return []
    return [
        "The runs are in float64, where strategies that compute the same also end the same; in float32 the rounding of "
        "sums sets them apart."
    ]
