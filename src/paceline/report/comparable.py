"""Checks that runs can be compared in one table."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.core.errors import UserError
from paceline.evaluation.protocol import require_same
from paceline.report.run import Run


def check_comparable(runs: Sequence[Run], across_recipes: bool) -> None:
    """Raise UserError if two runs cannot be compared in one table."""
    first = runs[0]
    for other in runs[1:]:
        pair = f"{first.folder} and {other.folder}"
        if other.recipe != first.recipe and not across_recipes:
            raise UserError(
                f"{pair} have different recipes ({first.recipe}, {other.recipe}); to compare them, use --across-recipes"
            )
        if other.best != first.best:
            metrics = f"{first.best[0]}, {other.best[0]}"
            raise UserError(f"{pair} are evaluated with different metrics ({metrics}) and cannot be compared")
        if (other.data, other.fingerprint) != (first.data, first.fingerprint):
            was, is_ = (f"{run.data}: {run.fingerprint}" for run in (first, other))
            raise UserError(f"{pair} were trained on different data ({was} ≠ {is_}) and cannot be compared")
    for metric in dict.fromkeys(name for run in runs for name in run.protocols):
        require_same({run.folder: run.protocols[metric] for run in runs if metric in run.protocols})
    labels = {name for run in runs for name in run.quality if name.partition("[")[0] == first.best[0] and "[" in name}
    if len(labels) > 1:
        raise UserError(
            "the metrics were computed with different feature networks and cannot be compared "
            f"({', '.join(sorted(labels))})"
        )
