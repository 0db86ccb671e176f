"""The summary of a report: the answer first, then the reasons for it."""

from __future__ import annotations

from paceline.report.content import PARITY
from paceline.report.content_speed import busy_sentences
from paceline.report.model import Report
from paceline.report.phrases import at
from paceline.report.summary_quality import doubts, lower_quality, quality_sentence
from paceline.report.summary_speed import reason_not_to_use_more, scaling_sentences, speed_sentence, tie_sentence


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
