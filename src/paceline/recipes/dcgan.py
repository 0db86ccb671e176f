"""DCGAN: a generator learns to produce images that a discriminator cannot tell from real ones.

Radford et al., Unsupervised Representation Learning with Deep Convolutional Generative Adversarial Networks (2015).
D returns logits. With `objective=bce`, the generator minimises softplus(-D(G(z))), and the discriminator minimises
softplus(-D(x)) + softplus(D(G(z))). See `models/losses.py` for the other objectives.

The preset `cifar10_reference` has the networks and settings from the baseline in the dual-discriminator GAN project,
and `cifar10` adds an EMA. The preset `quick` generates digits on a CPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from paceline.config.settings import setting
from paceline.contracts.recipe import Batch, DataSpec, Draw, Loss, Phase
from paceline.models.losses import OBJECTIVES, r1_penalty, score_range
from paceline.recipes.parts.generation import (
    R1_EVERY,
    Augmentation,
    DcganRecipe,
    GenerativeSettings,
    make_discriminator,
    make_generator,
)


@dataclass(frozen=True)
class DcganSettings(GenerativeSettings):
    """The networks and their loss."""

    objective: Literal["bce", "hinge", "lsgan"] = setting("bce", "adversarial loss")


class Dcgan(DcganRecipe):
    """Two networks, each trained in one phase. With R1, a third phase penalises the discriminator's gradient."""

    Settings = DcganSettings
    must_vary = ("discriminator/score_range",)

    def __init__(self, settings: DcganSettings, spec: DataSpec) -> None:
        super().__init__(settings, spec)
        self.generator = make_generator(settings, spec)
        self.discriminator = make_discriminator(settings, spec)
        self.objective = OBJECTIVES[settings.objective]
        self.augment = Augmentation(settings)
        self.draws = {"noise": Draw((settings.nz,), "normal"), **self.augment.draws}
        self.signals = self.augment.signals
        self.phases = (Phase("generator", "generator"), Phase("discriminator", "discriminator"))
        if settings.r1:
            self.phases += (Phase("penalty", "discriminator", every=R1_EVERY),)
            self.double_backward = ("discriminator",)

    def generator_loss(self, batch: Batch) -> Loss:
        """New fakes should score as real. The discriminator then trains on the same fakes."""
        fake = self.generator(batch["noise"])
        logits = self.discriminator(self.augment(fake, batch, "own"))
        terms = {"adversarial": self.objective.generator(logits).mean()}
        signals = {"fake_score": self.objective.score(logits), **self.augment.next_strength(batch)}
        return Loss(terms, shared={"fake": fake}, signals=signals)

    def discriminator_loss(self, batch: Batch) -> Loss:
        """Real images should score as real, fakes as fake."""
        # Use two passes, so that real and fake images have separate BatchNorm statistics.
        real = self.discriminator(self.augment(batch["image"], batch, "real"))
        fake = self.discriminator(self.augment(batch["fake"], batch, "fake"))
        terms = {"real": self.objective.real(real).mean(), "fake": self.objective.fake(fake).mean()}
        certainty = self.augment.certainty(real, self.objective.boundary)
        return Loss(terms, signals=self.objective.scores(real, fake) | score_range(real, fake) | certainty)

    def penalty_loss(self, batch: Batch) -> Loss:
        """R1 = r1 · ½‖∇D(x)‖² at real images x. R1 runs every R1_EVERY steps, so its weight is scaled by R1_EVERY."""
        penalties, logits = r1_penalty(
            lambda images: self.discriminator(self.augment(images, batch, "real")), batch["image"]
        )
        # R1 does not depend on the last bias, but every parameter needs a gradient: hence 0 * logits.
        return Loss({"r1": self.settings.r1 * R1_EVERY * penalties.mean() + 0 * logits.sum()})
