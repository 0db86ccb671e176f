"""Learning rate schedules, as functions of the images seen."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

from paceline.config.settings import LearnerSettings
from paceline.config.spans import Span
from paceline.contracts.phase import Clock


def schedule_of(
    settings: LearnerSettings, scale: float, *, epoch: int, step: int, total: int, burn_in: int = 0
) -> Callable[[int], float]:
    """Return the learning rate as a function of the images seen; `scale` multiplies its peak."""
    to_images = partial(Span.to_images, epoch=epoch, step=step, total=total)
    warmup = to_images(Span.parse(settings.warmup, "warmup"))
    hold = to_images(Span.parse(settings.hold, "hold"))
    milestones = [to_images(Span.parse(text, "milestones")) for text in settings.milestones.split(",")]
    peak = settings.lr * scale

    def after_warmup(images: int) -> float:
        progress = min(1.0, max(0, images - warmup) / max(1, total - warmup))
        match settings.schedule:
            case "cosine":
                return 0.5 * (1 + math.cos(math.pi * progress))
            case "linear":
                return min(1.0, max(0, total - images) / max(1, total - max(hold, warmup)))
            case "step":
                return settings.gamma ** sum(images >= at for at in milestones)
        return 1.0

    def learning_rate(images: int) -> float:
        ramp = images / warmup if images < warmup else 1.0
        rate = peak * ramp * after_warmup(images)
        return rate * Clock(images, step, burn_in).anneal(settings.burn_in_lr, 1.0) if burn_in else rate

    return learning_rate
