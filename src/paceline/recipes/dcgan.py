"""DCGAN: a generator learns to make pictures that a discriminator takes for real.

The preset `cifar10` holds the networks and settings that the dual-discriminator project compares its own
with; `quick` draws digits on a CPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from torch import Tensor

from paceline.config.settings import setting
from paceline.contracts.recipe import Batch, DataSpec, Draw, Loss, Phase, Recipe
from paceline.models.losses import OBJECTIVES
from paceline.recipes.parts import adversarial
from paceline.recipes.parts.adversarial import PENALTY_EVERY, AdversarialSettings, Views


@dataclass(frozen=True)
class DcganSettings(AdversarialSettings):
    """The networks, and what they compete for."""

    objective: Literal["bce", "hinge", "lsgan"] = setting("bce", "what the networks compete for")


class Dcgan(Recipe):
    """Two networks, two phases; a third one penalises the discriminator's gradient."""

    Settings = DcganSettings
    defaults = adversarial.DEFAULTS
    presets: ClassVar[dict[str, dict[str, Any]]] = {"cifar10": adversarial.CIFAR10, "quick": adversarial.QUICK}
    small = adversarial.SMALL
    aliases = adversarial.ALIASES
    evaluator = "generation"
    evaluated_on = "train"
    best = ("train/FID", "min")
    generates = True
    ema = ("generator",)
    must_match_weights = ("activation",)

    def __init__(self, settings: DcganSettings, spec: DataSpec) -> None:
        super().__init__(settings, spec)
        adversarial.check_pictures(spec)
        self.generator = adversarial.make_generator(settings, spec)
        self.discriminator = adversarial.make_discriminator(settings, spec)
        self.objective = OBJECTIVES[settings.objective]
        self.views = Views(settings.diffaugment)
        self.r1 = settings.r1
        self.draws = {"noise": Draw((settings.nz,), "normal")} | self.views.draws
        self.phases = (Phase("generator", "generator"), Phase("discriminator", "discriminator"))
        if self.r1:
            self.phases += (Phase("penalty", "discriminator", every=PENALTY_EVERY),)
            self.double_backward = ("discriminator",)

    def generator_loss(self, batch: Batch) -> Loss:
        """New fakes, to be taken for real; the discriminator then learns from the same ones."""
        fake = self.generator(batch["noise"])
        logits = self.discriminator(self.views(fake, batch, "own"))
        terms = {"adversarial": self.objective.generator(logits).mean()}
        return Loss(terms, {"fake": fake}, {"fake_score": adversarial.score(logits)})

    def discriminator_loss(self, batch: Batch) -> Loss:
        """Real pictures told from fakes."""
        return adversarial.discriminator_loss(self.discriminator, self.objective, self.views, batch)

    def penalty_loss(self, batch: Batch) -> Loss:
        """The discriminator's gradient at real pictures held small."""
        return adversarial.penalty_loss(self.discriminator, self.r1, self.views, batch)

    def predict(self, batch: Batch) -> dict[str, Tensor]:
        """A picture in -1…1 for each row of noise."""
        return {"image": self.generator(batch["noise"])}
