"""A small GAN to start from: `paceline train ./my_gan.py --data digits`.

A recipe defines networks and losses. Its code does not depend on devices, processes, precision or files, so
the same recipe runs on a CPU, on one GPU or on many, under every strategy.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn

from paceline import Batch, DataSpec, Draw, Evaluation, Loss, Phase, Recipe, setting


@dataclass(frozen=True)
class MyGanSettings:
    """The settings that this recipe adds; set them with `--set name=value`."""

    noise_size: int = setting(32, "length of the noise vector that each image is generated from", at_least=1)
    width: int = setting(256, "width of the hidden layers", at_least=1)


class MyGan(Recipe):
    """A generator that turns noise into images, and a discriminator that distinguishes them from real images."""

    Settings = MyGanSettings

    # Run and optimizer settings whose defaults this recipe changes.
    defaults = {
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
    presets = {"quick": {"epochs": 10, "width": 64}}  # selected by `--preset quick`

    # `predict` generates images from random inputs alone. These images are saved as samples and compared with the
    # training images using FID. The best checkpoint is the one with the lowest FID.
    generates = True
    evaluation = Evaluation("generation", best="train/FID", mode="min", split="train")

    # A training step runs the phases in order. Each phase updates one network with the loss from `<phase>_loss`.
    phases = (Phase("generator", network="generator"), Phase("discriminator", network="discriminator"))

    # Networks that are evaluated with the EMA of their weights. `ema_half_life` above sets the half-life.
    ema = ("generator",)

    def __init__(self, settings: MyGanSettings, spec: DataSpec) -> None:
        """Create the networks; `spec` describes the data: channels, height, width, classes."""
        super().__init__(settings, spec)
        shape = (spec.channels, spec.height, spec.width)
        pixels, width = spec.channels * spec.height * spec.width, settings.width
        # The engine adds this random input to each batch, one row per sample. The values are the same on any number of
        # devices.
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
        """Return a loss that is low if the discriminator rates fakes as real; share the fakes with the next phase."""
        fake = self.generator(batch["noise"])
        return Loss({"adversarial": F.softplus(-self.discriminator(fake)).mean()}, shared={"fake": fake})

    def discriminator_loss(self, batch: Batch) -> Loss:
        """Return a loss that is low if real images are rated as real and the fakes from the previous phase as fake."""
        real, fake = self.discriminator(batch["image"]), self.discriminator(batch["fake"])
        return Loss({"real": F.softplus(-real).mean(), "fake": F.softplus(fake).mean()})

    def predict(self, batch: Batch) -> dict[str, Tensor]:
        """Return one image for each row of noise, with values in [-1, 1]."""
        return {"image": self.generator(batch["noise"])}
