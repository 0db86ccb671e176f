"""The dual-discriminator GAN: one generator against two discriminators that learn apart from each other.

`against` says which of them trains the generator at a step, judged by their losses of the step before: those
are facts, the same in every process, and the choice is made on the device. `objective=d2gan` is the other
way to use two, of Nguyen et al. (2017): one discriminator rewards real pictures and one rewards fakes.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from paceline.config.settings import setting
from paceline.contracts.recipe import Batch, DataSpec, Draw, Loss, Phase, Recipe
from paceline.core.errors import UserError
from paceline.core.streams import run_side_by_side
from paceline.models.dcgan import Discriminator
from paceline.models.losses import OBJECTIVES, Objective, d2gan
from paceline.recipes.parts import adversarial
from paceline.recipes.parts.adversarial import PENALTY_EVERY, AdversarialSettings, Views

# What a discriminator's claim to the generator is, from its losses of real and of fake pictures; the larger claim wins.
CLAIMS = {
    "stronger": lambda real, fake: -(real + fake),
    "weaker": lambda real, fake: real + fake,
    # real₁ + fake₂ > real₂ + fake₁, with what each discriminator knows of itself on its own side.
    "swapped": lambda real, fake: real - fake,
}


@dataclass(frozen=True)
class DualGanSettings(AdversarialSettings):
    """The networks, what they compete for, and whom the generator meets."""

    objective: Literal["bce", "hinge", "lsgan", "d2gan"] = setting("bce", "what the networks compete for")
    against: Literal["auto", "swapped", "stronger", "weaker", "both", "random"] = setting(
        "auto",
        "which discriminator trains the generator: stronger has the smaller loss, weaker the larger; swapped has the "
        "larger loss of its own on real pictures plus the other's on fakes; auto is swapped, with d2gan both",
    )
    d2gan_alpha: float = setting(0.2, "d2gan: weight of the first discriminator's reward for real pictures")
    d2gan_beta: float = setting(0.1, "d2gan: weight of the second discriminator's reward for fakes")


class DualGan(Recipe):
    """Three networks, a phase for each; with a penalty, one more for each discriminator."""

    Settings = DualGanSettings
    defaults = adversarial.DEFAULTS
    presets: ClassVar[dict[str, dict[str, Any]]] = {
        "cifar10": adversarial.CIFAR10,
        "quick": adversarial.QUICK | {"epochs": 35},  # its steps take longer
    }
    small = adversarial.SMALL
    aliases = adversarial.ALIASES
    evaluator = "generation"
    evaluated_on = "train"
    best = ("train/FID", "min")
    generates = True
    ema = ("generator",)
    must_match_weights = ("activation",)

    def __init__(self, settings: DualGanSettings, spec: DataSpec) -> None:
        super().__init__(settings, spec)
        adversarial.check_pictures(spec)
        self.against = _checked_choice(settings)
        self.generator = adversarial.make_generator(settings, spec)
        self.discriminator_1 = adversarial.make_discriminator(settings, spec)
        self.discriminator_2 = adversarial.make_discriminator(settings, spec)
        self.objectives = _objectives(settings)
        self.views = Views(settings.diffaugment)
        self.r1 = settings.r1
        self.draws = {"noise": Draw((settings.nz,), "normal")} | self.views.draws
        if self.against == "random":
            self.draws["coin"] = Draw((), "uniform", common=True)
        if self.against in CLAIMS:
            self.signals = {"claim_1": 0.0, "claim_2": 0.0}
        self.phases = (
            Phase("generator", "generator"),
            Phase("discriminator_1", "discriminator_1"),
            Phase("discriminator_2", "discriminator_2", concurrent=True),
        )
        if self.r1:
            self.double_backward = ("discriminator_1", "discriminator_2")
            self.phases += (
                Phase("penalty_1", "discriminator_1", every=PENALTY_EVERY),
                Phase("penalty_2", "discriminator_2", every=PENALTY_EVERY, concurrent=True),
            )

    def generator_loss(self, batch: Batch) -> Loss:
        """New fakes, to be taken for real by the discriminator that `against` chooses."""
        fake = self.generator(batch["noise"])
        seen = self.views(fake, batch, "own")
        # Both judge, since a choice made before would have to wait for the device.
        judges = [partial(evaluator, seen) for evaluator in (self.discriminator_1, self.discriminator_2)]
        logits_1, logits_2 = run_side_by_side(judges, seen.device)
        losses = self._choose(self.objectives[0].generator(logits_1), self.objectives[1].generator(logits_2), batch)
        scores = {"fake_score_1": adversarial.score(logits_1), "fake_score_2": adversarial.score(logits_2)}
        return Loss({"adversarial": losses.mean()}, {"fake": fake}, scores)

    def discriminator_1_loss(self, batch: Batch) -> Loss:
        """Real pictures told from fakes by the first discriminator."""
        return self._discriminator_loss(1, self.discriminator_1, batch)

    def discriminator_2_loss(self, batch: Batch) -> Loss:
        """Real pictures told from fakes by the second discriminator."""
        return self._discriminator_loss(2, self.discriminator_2, batch)

    def penalty_1_loss(self, batch: Batch) -> Loss:
        """The first discriminator's gradient at real pictures held small."""
        return adversarial.penalty_loss(self.discriminator_1, self.r1, self.views, batch)

    def penalty_2_loss(self, batch: Batch) -> Loss:
        """The second discriminator's gradient at real pictures held small."""
        return adversarial.penalty_loss(self.discriminator_2, self.r1, self.views, batch)

    def predict(self, batch: Batch) -> dict[str, Tensor]:
        """A picture in -1…1 for each row of noise."""
        return {"image": self.generator(batch["noise"])}

    def _choose(self, first: Tensor, second: Tensor, batch: Batch) -> Tensor:
        """The generator's loss per sample; one choice for all samples of a step, and no waiting for it."""
        if self.against == "both":
            return first + second
        if self.against == "random":
            return torch.where(batch["coin"] < 0.5, first, second)
        return torch.where(batch["claim_1"] >= batch["claim_2"], first, second)

    def _discriminator_loss(self, number: int, discriminator: Discriminator, batch: Batch) -> Loss:
        loss = adversarial.discriminator_loss(discriminator, self.objectives[number - 1], self.views, batch)
        if self.against in CLAIMS:
            loss.signals[f"claim_{number}"] = CLAIMS[self.against](loss.terms["real"], loss.terms["fake"]).detach()
        return loss


def _checked_choice(settings: DualGanSettings) -> str:
    """Whom the generator meets, where the other settings allow it."""
    if settings.objective != "d2gan":
        return "swapped" if settings.against == "auto" else settings.against
    if settings.against not in ("auto", "both"):
        raise UserError(f"objective=d2gan and against={settings.against}: d2gan needs both; leave against out")
    if settings.r1:
        raise UserError(f"objective=d2gan and r1={settings.r1:g}: the penalty is for bce, hinge and lsgan; use r1=0")
    for name in ("d2gan_alpha", "d2gan_beta"):
        if not 0 < getattr(settings, name) <= 1:
            raise UserError(f"{name}={getattr(settings, name):g}: must be above 0 and at most 1")
    return "both"


def _objectives(settings: DualGanSettings) -> tuple[Objective, Objective]:
    if settings.objective == "d2gan":
        return d2gan(settings.d2gan_alpha, settings.d2gan_beta)
    return OBJECTIVES[settings.objective], OBJECTIVES[settings.objective]
