"""A test recipe with two networks, three phases, shared tensors, signals between phases and random inputs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.config.settings import setting
from paceline.contracts.recipe import Batch, DataSpec, Draw, Evaluation, Loss, Phase, Recipe


@dataclass(frozen=True)
class DuetSettings:
    """The setting that tests can change."""

    norm: Literal["batch", "none"] = setting("batch", "normalisation")


class Duet(Recipe):
    """A generator, a critic that trains twice per step, and a penalty every third step."""

    Settings = DuetSettings
    evaluation = Evaluation("accuracy")
    defaults: ClassVar[dict[str, Any]] = {
        "data": "digits",
        "size": 8,
        "batch_size": "24",
        "images": 48 * 8,
        "optimizer": "adam",
        "lr": 0.01,
        "ema_half_life": "100 images",
        "log_every": "2 steps",
        "save_every": "2 steps",
    }
    phases = (
        Phase("generator", "generator"),
        Phase("critic", "critic", repeat=2),
        Phase("penalty", "critic", every=3),
    )
    draws: ClassVar[dict[str, Draw]] = {"noise": Draw((5,)), "mix": Draw((1,), "uniform")}
    signals: ClassVar[dict[str, float]] = {"gap": 0.5, "level": 0.25, "spare": 0.75, "real": 0.125}
    ema = ("generator",)
    double_backward = ("critic",)

    def __init__(self, settings: DuetSettings, spec: DataSpec) -> None:
        super().__init__(settings, spec)
        self.seen: list[tuple[str, Batch]] = []  # batches received by each phase, recorded for tests
        self.watched = False
        pixels = spec.channels * spec.height * spec.width
        norm = (lambda: nn.BatchNorm1d(8)) if settings.norm == "batch" else nn.Identity
        biased = settings.norm == "none"  # BatchNorm cancels a bias, so the bias gradient would only be rounding error
        self.generator = nn.Sequential(nn.Linear(5, 8, biased), norm(), nn.Tanh(), nn.Linear(8, pixels), nn.Tanh())
        self.critic = nn.Sequential(nn.Linear(pixels, 8, biased), norm(), nn.Tanh(), nn.Linear(8, 1))

    def generator_loss(self, batch: Batch) -> Loss:
        self._record("generator", batch)
        fake = self.generator(batch["noise"])
        adversarial = F.softplus(-self.critic(fake)).mean() * (1 + batch["gap"].mean())
        signals = {"level": fake.mean(), "spare": fake.abs().mean()}
        return Loss({"adversarial": adversarial, "size": 0.1 * fake.square().mean()}, {"fake": fake}, signals)

    def critic_loss(self, batch: Batch) -> Loss:
        self._record("critic", batch)
        real = self.critic(batch["image"].flatten(1))
        fake = batch["fake"] if "fake" in batch else self.generator(batch["noise"]).detach()
        assert not fake.requires_grad, "shared tensors must be detached"
        fake = self.critic(fake)
        loss = F.softplus(-real).mean() + F.softplus(fake).mean()
        return Loss({"both": loss}, signals={"gap": real.mean() - fake.mean(), "real": real.mean()})

    def penalty_loss(self, batch: Batch) -> Loss:
        self._record("penalty", batch)
        mixed = batch["image"].flatten(1) * batch["mix"]
        mixed.requires_grad_(True)
        scores = self.critic(mixed)
        (slope,) = torch.autograd.grad(scores.sum(), mixed, create_graph=True)
        penalty = slope.square().sum(1).mean() * (1 + batch["gap"].mean() + batch["level"].mean())
        return Loss({"slope": penalty + 0 * scores.mean()})  # adding 0 gives the last bias a gradient

    def predict(self, batch: Batch) -> dict[str, Tensor]:
        self._record("predict", batch)
        return {"logits": self.critic(batch["image"].flatten(1)).expand(-1, 10)}

    def _record(self, phase: str, batch: Batch) -> None:
        if self.watched:
            self.seen.append((phase, {name: value.detach().clone() for name, value in batch.items()}))
