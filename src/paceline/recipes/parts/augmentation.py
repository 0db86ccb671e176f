"""Augmentation of the images that a discriminator sees: DiffAugment, or transforms with a variable strength (ADA).

With `ada`, the strength adapts: it rises while the discriminator is too certain about real images, which is a sign of
overfitting, and falls otherwise. It is a signal: the same on every device and part of each checkpoint. With
`ada_strength`, the strength follows a schedule instead.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from paceline.config.settings import setting
from paceline.contracts.recipe import Batch, Clock, Draw
from paceline.core.errors import UserError, unknown
from paceline.models import adaptive_augment, diffaugment
from paceline.models.adaptive_augment import MAX_STRENGTH

STRENGTH, CERTAINTY, STEP = "augment_strength", "augment_certainty", "augment_step"
RAMP = 0.1  # distance from the target at which the strength changes at full speed


@dataclass(frozen=True)
class AugmentationSettings:
    """How the images that the discriminator sees are augmented."""

    diffaugment: str = setting(
        "", "differentiable augmentation of real and fake images: color, translation and/or cutout, separated by commas"
    )
    ada: str = setting(
        "", "augmentation with adaptive strength (ADA): blit, geometry, color and/or cutout, separated by commas"
    )
    ada_target: float = setting(
        0.6,
        "target for the discriminator's certainty, which is the mean sign of its output for real images, relative to "
        "that of an uncertain discriminator (r3gan: of the difference between its outputs for real and fake images); "
        "ADA raises its strength if the certainty is higher",
        at_least=0,
        below=1,
    )
    ada_images: int = setting(
        500_000, "number of images in which the strength of ADA can change by 1 (it is at most 0.8)", at_least=1
    )
    ada_strength: float = setting(
        0.0,
        "strength of `ada`, which rises from 0 to this value during the burn-in; 0: adaptive strength",
        at_least=0,
        at_most=MAX_STRENGTH,
    )


class Augmentation:
    """Prepares images for a discriminator: randomly augmented, or unchanged if no augmentation is set."""

    def __init__(self, settings: AugmentationSettings) -> None:
        self.fixed = _parse("diffaugment", settings.diffaugment, diffaugment.KINDS)
        self.variable = _parse("ada", settings.ada, adaptive_augment.KINDS)
        if self.fixed and self.variable:
            raise UserError(
                f"diffaugment={settings.diffaugment} and ada={settings.ada}: cannot be combined; choose one"
            )
        for name in ("ada_target", "ada_images", "ada_strength"):
            value, default = getattr(settings, name), getattr(type(settings), name)
            if value != default and not self.variable:
                raise UserError(
                    f"{name}={value:g}: there is nothing to apply; choose transforms, "
                    f"for example with ada=blit,geometry,color, or set {name}={default:g}"
                )
            if value != default and settings.ada_strength and name != "ada_strength":
                raise UserError(
                    f"{name}={value:g}: not used with ada_strength={settings.ada_strength:g}, with which the strength "
                    "does not adapt; remove one of them"
                )
        self.final_strength = settings.ada_strength
        self.is_adaptive = bool(self.variable) and not self.final_strength
        self.target, self.num_images = settings.ada_target, settings.ada_images

    @property
    def draws(self) -> dict[str, Draw]:
        """The random inputs of the augmentation, one for each set of images that a discriminator sees."""
        if not self.fixed and not self.variable:
            return {}
        numbers = Draw((diffaugment.NUM_UNIFORMS if self.fixed else adaptive_augment.NUM_UNIFORMS,), "uniform")
        return {f"view_of_{what}": numbers for what in ("own", "fake", "real")}

    @property
    def signals(self) -> dict[str, float]:
        """The adaptive strength and the measure that controls it, with their initial values."""
        return {STRENGTH: 0.0, CERTAINTY: 0.0} if self.is_adaptive else {}

    @property
    def scheduled(self) -> Mapping[str, Callable[[Clock], float]]:
        """The strength if it follows a schedule; the largest change of an adaptive strength in a step."""
        if self.is_adaptive:
            return {STEP: lambda clock: clock.images_per_step / self.num_images}
        return {STRENGTH: lambda clock: clock.anneal(0.0, self.final_strength)} if self.variable else {}

    def __call__(self, images: Tensor, batch: Batch, what: Literal["own", "fake", "real"]) -> Tensor:
        if self.variable:
            return adaptive_augment.augment(images, batch[f"view_of_{what}"], batch[STRENGTH], self.variable)
        return diffaugment.augment(images, batch[f"view_of_{what}"], self.fixed) if self.fixed else images

    def next_strength(self, batch: Batch) -> dict[str, Tensor]:
        """Return the signal with the strength for the next phases; call it in one phase of each step."""
        if not self.is_adaptive:
            return {}
        excess = (batch[CERTAINTY][0] - self.target) / RAMP
        strength = batch[STRENGTH][0] + excess.clamp(-1, 1) * batch[STEP][0]
        return {STRENGTH: strength.clamp(0, MAX_STRENGTH)}

    def certainty(self, logits: Tensor, boundary: float = 0.0) -> dict[str, Tensor]:
        """Return the signal that controls the strength, from logits above `boundary` for images classified as real."""
        return {CERTAINTY: (logits.detach() - boundary).sign().mean()} if self.is_adaptive else {}


def _parse(name: str, text: str, known: tuple[str, ...]) -> tuple[str, ...]:
    kinds = tuple(kind.strip() for kind in text.split(",") if kind.strip())
    for kind in kinds:
        if kind not in known:
            raise UserError(f"{name}={text}: {unknown('augmentation', kind, known)}")
    return kinds
