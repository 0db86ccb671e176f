"""When the loop logs, evaluates, samples and saves, counted in images seen."""

from __future__ import annotations

from paceline.config.settings import RunSettings
from paceline.config.spans import Span

SETTINGS = ("log_every", "evaluate_every", "sample_every", "save_every")


class Cadence:
    """How many images lie between two logs, evaluations, samples or checkpoints; one number per setting."""

    def __init__(self, run: RunSettings, *, epoch: int, step: int, total: int) -> None:
        lengths = {"epoch": epoch, "step": step, "total": total}
        self._every = {name: max(1, Span.parse(getattr(run, name), name).to_images(**lengths)) for name in SETTINGS}

    def is_due(self, name: str, before: int, after: int) -> bool:
        """Return whether something is due after a step, given the images seen before and after it."""
        every = self._every[name]
        return after // every > before // every
