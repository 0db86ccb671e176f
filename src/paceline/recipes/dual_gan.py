"""The dual-discriminator GAN: one generator against two discriminators that are trained independently.

`against` selects which of the two discriminators trains the generator in a step, based on their losses in the previous
step. These losses are signals (values passed between phases, averaged across all devices), so that every process makes
the same choice without waiting for its device. `objective=d2gan` follows Nguyen et al. (2017): one discriminator
rewards real images, the other rewards fakes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from paceline.config.settings import setting
from paceline.contracts.recipe import Batch, DataSpec, Draw, Loss, Phase
from paceline.core.errors import UserError
from paceline.models.dcgan import Discriminator
from paceline.models.layers import apply_concurrently
from paceline.models.losses import OBJECTIVES, d2gan, score_range
from paceline.recipes.parts.generation import R1_EVERY, DcganRecipe, GenerativeSettings, make_discriminator

# A discriminator's priority for training the generator, from its losses on real and fake images; the highest wins.
PRIORITIES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "stronger": lambda real, fake: -(real + fake),
    "weaker": lambda real, fake: real + fake,
    # Same as real₁ + fake₂ > real₂ + fake₁, with each discriminator's losses on one side.
    "swapped": lambda real, fake: real - fake,
}


@dataclass(frozen=True)
class DualGanSettings(GenerativeSettings):
    """The networks, their loss, and which discriminator trains the generator."""

    objective: Literal["bce", "hinge", "lsgan", "d2gan"] = setting("bce", "adversarial loss")
    against: Literal["auto", "swapped", "stronger", "weaker", "both", "random"] = setting(
        "auto",
        "which discriminator trains the generator: stronger (smaller loss), weaker (larger loss), swapped "
        "(like weaker, but with the two losses on fake images swapped), both, random, "
        "or auto (both for d2gan, else swapped)",
    )
    d2gan_alpha: float = setting(0.2, "d2gan: weight of the first discriminator's reward for real images")
    d2gan_beta: float = setting(0.1, "d2gan: weight of the second discriminator's reward for fake images")


class DualGan(DcganRecipe):
    """Three networks, each trained in one phase. With R1, each discriminator has one more phase."""

    Settings = DualGanSettings
    must_vary = ("discriminator_1/score_range", "discriminator_2/score_range")
    presets = {
        **DcganRecipe.presets,
        "quick": {**DcganRecipe.presets["quick"], "epochs": 35},  # fewer epochs, because each step takes longer
    }

    @classmethod
    def check(cls, settings: DualGanSettings) -> None:
        """Raise UserError if the weights of d2gan are set for another objective, which does not use them."""
        for name in ("d2gan_alpha", "d2gan_beta"):
            value, default = getattr(settings, name), getattr(DualGanSettings, name)
            if value != default and settings.objective != "d2gan":
                raise UserError(
                    f"{name}={value:g}: not used with objective={settings.objective}; use objective=d2gan, or remove it"
                )

    def __init__(self, settings: DualGanSettings, spec: DataSpec) -> None:
        super().__init__(settings, spec)
        self.against = _checked_choice(settings)
        self.discriminator_1 = make_discriminator(settings, spec)
        self.discriminator_2 = make_discriminator(settings, spec)
        self.objectives = (
            (OBJECTIVES[settings.objective],) * 2
            if settings.objective in OBJECTIVES
            else d2gan(settings.d2gan_alpha, settings.d2gan_beta)
        )
        if self.against == "random":
            self.draws["coin"] = Draw((), "uniform", common=True)
        priorities = {"priority_1": 0.0, "priority_2": 0.0} if self.against in PRIORITIES else {}
        self.signals = {**self.augment.signals, **priorities}
        self.phases = (
            Phase("generator", "generator"),
            Phase("discriminator_1", "discriminator_1"),
            Phase("discriminator_2", "discriminator_2", concurrent=True),
        )
        if settings.r1:
            self.double_backward = ("discriminator_1", "discriminator_2")
            self.phases += (
                Phase("penalty_1", "discriminator_1", every=R1_EVERY),
                Phase("penalty_2", "discriminator_2", every=R1_EVERY, concurrent=True),
            )

    def generator_loss(self, batch: Batch) -> Loss:
        """New fakes should score as real with the discriminator that `against` selects."""
        fake = self.generator(batch["noise"])
        # Run both discriminators: to skip one, the host would have to wait for the choice on the device.
        discriminators = (self.discriminator_1, self.discriminator_2)
        logits_1, logits_2 = apply_concurrently(discriminators, self.augment(fake, batch, "own"))
        losses = self._choose(self.objectives[0].generator(logits_1), self.objectives[1].generator(logits_2), batch)
        first, second = self.objectives
        signals = {"fake_score_1": first.score(logits_1), "fake_score_2": second.score(logits_2)}
        signals |= self.augment.next_strength(batch)
        return Loss({"adversarial": losses.mean()}, shared={"fake": fake}, signals=signals)

    def discriminator_1_loss(self, batch: Batch) -> Loss:
        """The first discriminator's loss."""
        return self._discriminator_loss(1, self.discriminator_1, batch)

    def discriminator_2_loss(self, batch: Batch) -> Loss:
        """The second discriminator's loss."""
        return self._discriminator_loss(2, self.discriminator_2, batch)

    def penalty_1_loss(self, batch: Batch) -> Loss:
        """The first discriminator's R1 penalty."""
        return self.penalty(self.discriminator_1, batch)

    def penalty_2_loss(self, batch: Batch) -> Loss:
        """The second discriminator's R1 penalty."""
        return self.penalty(self.discriminator_2, batch)

    def _choose(self, first: Tensor, second: Tensor, batch: Batch) -> Tensor:
        """Return the generator's loss per sample. The discriminator is chosen on the device, once per step."""
        if self.against == "both":
            return first + second
        if self.against == "random":
            return torch.where(batch["coin"] < 0.5, first, second)
        return torch.where(batch["priority_1"] >= batch["priority_2"], first, second)

    def _discriminator_loss(self, number: int, discriminator: Discriminator, batch: Batch) -> Loss:
        """Real images should score as real, fakes as fake."""
        objective = self.objectives[number - 1]
        # Use two passes, so that real and fake images have separate BatchNorm statistics.
        real = discriminator(self.augment(batch["image"], batch, "real"))
        fake = discriminator(self.augment(batch["fake"], batch, "fake"))
        terms = {"real": objective.real(real).mean(), "fake": objective.fake(fake).mean()}
        signals = objective.scores(real, fake) | score_range(real, fake)
        if number == 1:  # one strength for both discriminators, controlled by the first
            signals |= self.augment.certainty(real, objective.boundary)
        if self.against in PRIORITIES:
            signals[f"priority_{number}"] = PRIORITIES[self.against](terms["real"], terms["fake"]).detach()
        return Loss(terms, signals=signals)


def _checked_choice(settings: DualGanSettings) -> str:
    """Return the resolved value of `against`; raise UserError if it conflicts with other settings."""
    if settings.objective != "d2gan":
        return "swapped" if settings.against == "auto" else settings.against
    if settings.against not in ("auto", "both"):
        raise UserError(
            f"objective=d2gan and against={settings.against}: d2gan needs both discriminators; use against=both"
        )
    if settings.r1:
        raise UserError(f"objective=d2gan and r1={settings.r1:g}: R1 only works with bce, hinge and lsgan; use r1=0")
    for name, value in (("d2gan_alpha", settings.d2gan_alpha), ("d2gan_beta", settings.d2gan_beta)):
        if not 0 < value <= 1:
            raise UserError(f"{name}={value:g}: must be above 0 and at most 1")
    return "both"
