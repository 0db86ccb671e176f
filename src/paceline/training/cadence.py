"""When the loop logs, evaluates, samples and saves, counted in images seen."""

from __future__ import annotations

from paceline.config.settings import RunSettings
from paceline.config.spans import INTERVALS, parse_interval


class Cadence:
    """How many images lie between two logs, evaluations, samples or checkpoints; one number per setting.

    A setting that is `never` has no number.
    """

    def __init__(self, run: RunSettings, *, epoch: int, step: int, total: int) -> None:
        lengths = {"epoch": epoch, "step": step, "total": total}
        spans = {name: parse_interval(getattr(run, name), name) for name in INTERVALS}
        self._every = {name: max(1, span.to_images(**lengths)) for name, span in spans.items() if span}

    def is_due(self, name: str, before: int, after: int) -> bool:
        """Return whether something is due after a step, given the images seen before and after it."""
        every = self._every.get(name)
        return every is not None and after // every > before // every
