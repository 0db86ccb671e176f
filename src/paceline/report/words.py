"""The summary: the recommendation first, then what it rests on."""

from __future__ import annotations

from typing import Any

from paceline.report.content import digits_for, metric_said, quality_of, with_spread
from paceline.report.losses import STEPS
from paceline.report.phrases import at

Report = dict[str, Any]


def summarise(report: Report) -> list[str]:
    """Sentences, the recommendation first."""
    groups, advice = report["groups"], report["recommendation"]
    if not groups or advice is None:
        wanted, ended = at("d", "counts", "wanted"), at("d", "counts", "done")
        return [f"No recommendation: of {wanted} runs, {ended} ended with numbers that can be compared."]
    said = [_advice(report), *_quality(report), *_scaling(report), *_why(report), *_parity(report)]
    left = report["counts"]["left"]
    if left:
        words = "run has" if left == 1 else "runs have"
        said.append(f"{at('d', 'counts', 'left')} {words} no numbers; the reasons are below.")
    return said


def _judged(report: Report, group: dict[str, Any]) -> tuple[str, str]:
    """What the groups are judged by, and the group's value."""
    if not report["recommendation"]["by_choice"]:
        shown = report["metric"]["shown"]
        return shown, _with_unit(shown, quality_of(group, shown))
    name, summary = report["metric"]["name"], group["chosen_by"]
    value = with_spread(digits_for(name, summary), summary, "groups", group["id"], "chosen_by")
    return name, _with_unit(name, value)


def _with_unit(metric: str, value: str) -> str:
    return value + (" %" if "/top" in metric else "")


def _advice(report: Report) -> str:
    groups, advice = report["groups"], report["recommendation"]
    chosen = groups[advice["group"]]
    speed = at(",.0f", "groups", advice["group"], "images_per_second", "mean")
    others = [g for g in groups.values() if g["id"] != chosen["id"]]
    if not others:
        return f"**{chosen['label']}** trains at {speed} images per second; there is nothing to compare it with."
    words = f"Use **{chosen['label']}**: {speed} images per second"
    if chosen["scaling"] and chosen["devices"] > 1:
        words += f", {at('.2f', 'groups', chosen['id'], 'scaling', 'speedup')}× one device"
    one = len(advice["equal"]) == 1
    words += ", the fastest" if not one else ""
    if advice["best"] is None:
        return f"{words}. No quality was measured, so this is about speed alone."
    metric, value = _judged(report, chosen)
    if one:
        words += f", and the best {metric_said(metric)} of all, {value}"
    elif len(advice["equal"]) < len([g for g in groups.values() if not g["shares_a_gpu"]]):
        words += f" of those with a good {metric_said(metric)} ({value})"
    else:
        words += (
            ", and none is worse beyond its seeds" if advice["by_seeds"] else ""
        ) + f" ({metric_said(metric)} {value})"
    shown = report["metric"]["shown"]
    if shown != metric and shown in chosen["quality"]:
        words += f"; its {metric_said(shown)} is {_with_unit(shown, quality_of(chosen, shown))}"
    return f"{words}."


def _quality(report: Report) -> list[str]:
    advice, groups = report["recommendation"], report["groups"]
    if advice["best"] is None or len(groups) < 2:
        return []
    best = groups[advice["best"]]
    metric, value = _judged(report, best)
    left = [g for g in groups.values() if g["id"] not in advice["equal"] and not g["shares_a_gpu"]]
    worse = ", ".join(g["label"] for g in left if g["images_per_second"])
    words = f"The best {metric_said(metric)} is {value}, of {best['label']}"
    if advice["by_seeds"]:
        words += f"; worse beyond what the seeds explain: {worse}" if worse else "; no other is worse beyond its seeds"
    else:
        words += f"; clearly worse: {worse}" if worse else ""
        words += ". With one seed, rows that differ in their strategy alone are taken as equally good"
    return [f"{words}."]


def _scaling(report: Report) -> list[str]:
    found = [g for g in report["groups"].values() if g["scaling"] and g["devices"] > 1 and not g["shares_a_gpu"]]
    if not found:
        return []
    parts = [f"{g['label']} {at('.0%', 'groups', g['id'], 'scaling', 'efficiency')}" for g in found]
    return [f"Scaling efficiency against one device: {', '.join(parts)}."]


def _why(report: Report) -> list[str]:
    said = []
    for key, ladder in report["why_not"].items():
        if ladder["largest"]:
            cause, fix = STEPS[ladder["largest"]]
            gain = at("+.0%", "why_not", key, "gain")
            said.append(f"Why {report['groups'][key]['label']} is not faster: {cause}. Try {fix} ({gain} at most).")
    return said


def _parity(report: Report) -> list[str]:
    if not report["parity"]:
        return []
    failed = [
        recipe
        for recipe, parity in report["parity"].items()
        if any(d["value"] > d["tolerance"] for d in parity["differences"])
    ]
    names = ", ".join(report["parity"])
    if failed:
        return [
            f"Strategies do **not** agree for {', '.join(failed)}: see “The same weights?” before using any of them."
        ]
    return [f"Strategies agree: in float64 they give the same weights ({names})."]
