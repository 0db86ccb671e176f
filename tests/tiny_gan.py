"""A small GAN recipe for tests: two linear networks that train on 8×8 images of digits."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.contracts.recipe import Batch, DataSpec, Draw, Evaluation, Loss, NoSettings, Phase, Recipe


class TinyGan(Recipe):
    """A generator and a discriminator with one layer each."""

    evaluation = Evaluation("generation", best="train/FID", mode="min", split="train")
    generates = True
    defaults: ClassVar[dict[str, Any]] = {
        "data": "digits",
        "size": 8,
        "batch_size": "32",
        "images": 1920,
        "lr": 0.01,
        "validation": 0.0,
        "evaluate_every": "640 images",
        "sample_every": "640 images",
        "save_every": "640 images",
        "ema_half_life": "200 images",
    }
    phases = (Phase("generator", "generator"), Phase("discriminator", "discriminator"))
    ema = ("generator",)

    def __init__(self, settings: NoSettings, spec: DataSpec) -> None:
        super().__init__(settings, spec)
        self.shape = (spec.channels, spec.height, spec.width)
        pixels = spec.channels * spec.height * spec.width
        self.generator = nn.Linear(6, pixels)
        self.discriminator = nn.Linear(pixels, 1)
        self.draws = {"noise": Draw((6,), "normal"), "coin": Draw((), "uniform", common=True)}

    def generator_loss(self, batch: Batch) -> Loss:
        fake = self.predict(batch)["image"]
        return Loss({"adversarial": F.softplus(-self.discriminator(fake.flatten(1))).mean()}, {"fake": fake})

    def discriminator_loss(self, batch: Batch) -> Loss:
        real, fake = (self.discriminator(batch[name].flatten(1)) for name in ("image", "fake"))
        return Loss({"real": F.softplus(-real).mean(), "fake": F.softplus(fake).mean()})

    def predict(self, batch: Batch) -> dict[str, Tensor]:
        return {"image": torch.tanh(self.generator(batch["noise"])).unflatten(1, self.shape)}
