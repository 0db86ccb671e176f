"""When the loop logs, evaluates, samples and saves, counted in images seen."""

from __future__ import annotations

import math

from paceline.config.settings import RunSettings
from paceline.config.spans import INTERVALS, parse_interval

TRAINED_PER_EVALUATED = 4  # images to train on, at least, per image to evaluate, which needs about a third of the work
MIN_STEPS = 10  # between two evaluations, since each one takes some time for any number of images
FEW, MANY = 3, 50  # evaluations per run: as many in spite of `MIN_STEPS`, and at most


class Cadence:
    """How many images lie between two logs, evaluations, samples or checkpoints; one number per setting.

    A setting that is `never` has no number. `evaluated` is the size of the evaluated split in training images.
    """

    def __init__(self, run: RunSettings, *, epoch: int, step: int, total: int, evaluated: float = 0.0) -> None:
        lengths = {"epoch": epoch, "step": step, "total": total}
        spans = {name: parse_interval(getattr(run, name), name) for name in INTERVALS}
        self._every = {name: max(1, span.to_images(**lengths)) for name, span in spans.items() if span}
        self.note = ""
        for name in (name for name, span in spans.items() if span and not span.amount):
            size = evaluated if name == "evaluate_every" else 0.0
            self._every[name] = automatic_interval(**lengths, evaluated=size)
            if name == "evaluate_every" and evaluated and max(epoch, step) < self._every[name]:
                self.note = _describe(self._every[name] // epoch, ends=self._every[name] >= total)

    def is_due(self, name: str, before: int, after: int) -> bool:
        """Return whether something is due after a step, given the images seen before and after it."""
        every = self._every.get(name)
        return every is not None and after // every > before // every


def automatic_interval(*, epoch: int, step: int, total: int, evaluated: float) -> int:
    """Return an interval of whole epochs, which depends on numbers of images only, so that every machine uses the same.

    The shorter the run and the larger the evaluated split, the fewer evaluations.
    """
    at_least = max(total / MANY, min(MIN_STEPS * step, total / FEW), TRAINED_PER_EVALUATED * evaluated)
    return max(1, math.ceil(at_least / epoch)) * epoch


def _describe(epochs: int, *, ends: bool) -> str:
    interval = "only at the end" if ends else f"every {epochs} epochs"
    return f"evaluation: {interval} (evaluate_every=auto); use --set 'evaluate_every=1 epochs' for every epoch"
