"""A small GAN, to start a recipe of several networks from: `paceline train ./my_gan.py --data digits`.

A recipe says what learns and from which losses. It knows no device, process, precision or file, so the
same file runs on a CPU, on one GPU or on many, under every strategy.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch.nn.functional as F
from torch import Tensor, nn

from paceline.config.settings import setting
from paceline.contracts.recipe import Batch, DataSpec, Draw, Loss, Phase, Recipe


@dataclass(frozen=True)
class MyGanSettings:
    """The recipe's own settings; each can be given as `--set name=value`."""

    noise_size: int = setting(32, "random numbers from which a picture is made", at_least=1)
    width: int = setting(256, "features of the hidden layers", at_least=1)


class MyGan(Recipe):
    """A generator that makes pictures of noise, and a discriminator that tells them from real ones."""

    Settings = MyGanSettings

    # Settings of the run and of its learners that suit this recipe better than the general defaults.
    defaults: ClassVar[dict[str, Any]] = {
        "data": "digits",
        "epochs": 40,
        "batch_size": "64",
        "size": 16,
        "lr": 2e-4,
        "beta1": 0.5,
        "ema_half_life": "4000 images",
        "validation": 0.0,
        "evaluate_every": "5 epochs",
        "sample_every": "5 epochs",
        "save_every": "5 epochs",
    }
    presets: ClassVar[dict[str, dict[str, Any]]] = {"quick": {"epochs": 10, "width": 64}}  # `--preset quick`

    # `predict` makes pictures of the draws alone: they are sampled, and judged against the training pictures.
    generates = True
    evaluator = "generation"
    evaluated_on = "train"
    best = ("train/FID", "min")

    # A step runs these in order. A phase updates one network, by the loss of the method `<phase>_loss`.
    phases = (Phase("generator", network="generator"), Phase("discriminator", network="discriminator"))

    # Networks that are judged by the moving average of their weights, where one is kept: `average` above.
    ema = ("generator",)

    def __init__(self, settings: MyGanSettings, spec: DataSpec) -> None:
        """Builds the networks; `facts` is what the data says about its samples."""
        super().__init__(settings, spec)
        shape = (spec.channels, spec.height, spec.width)
        pixels, width = spec.channels * spec.height * spec.width, settings.width
        # Random numbers come with the batch, a row for each sample: the same on one device and on many.
        self.draws = {"noise": Draw((settings.noise_size,), "normal")}
        self.generator = nn.Sequential(
            nn.Linear(settings.noise_size, width),
            nn.BatchNorm1d(width),
            nn.ReLU(),
            nn.Linear(width, width),
            nn.BatchNorm1d(width),
            nn.ReLU(),
            nn.Linear(width, pixels),
            nn.Tanh(),
            nn.Unflatten(1, shape),
        )
        self.discriminator = nn.Sequential(
            nn.Flatten(),
            nn.Linear(pixels, width),
            nn.LeakyReLU(0.2),
            nn.Linear(width, width),
            nn.LeakyReLU(0.2),
            nn.Linear(width, 1),
        )

    def generator_loss(self, batch: Batch) -> Loss:
        """New fakes are to be taken for real; they are shared, so that the next phase learns from the same ones."""
        fake = self.generator(batch["noise"])
        return Loss({"adversarial": F.softplus(-self.discriminator(fake)).mean()}, shared={"fake": fake})

    def discriminator_loss(self, batch: Batch) -> Loss:
        """Real pictures told from fakes, by logits; what was shared arrives without its graph."""
        real, fake = self.discriminator(batch["image"]), self.discriminator(batch["fake"])
        return Loss({"real": F.softplus(-real).mean(), "fake": F.softplus(fake).mean()})

    def predict(self, batch: Batch) -> dict[str, Tensor]:
        """A picture in -1…1 for each row of noise: what is sampled and judged."""
        return {"image": self.generator(batch["noise"])}
