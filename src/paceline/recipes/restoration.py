"""Paired restoration: a network learns to undo what was done to pictures (blur, noise, rain, compression).

A sample is the picture to be restored ("image") and the one that should come out ("target"). Pixels are what is
compared; VGG19's features and a discriminator take part where their terms have a weight.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from torch import Tensor, nn

from paceline.config.settings import setting
from paceline.contracts.recipe import Batch, DataSpec, Loss, Phase, Recipe
from paceline.models.srresnet import Discriminator, SRResNet
from paceline.models.unet import UNet
from paceline.recipes.parts.restoration import RestorationTerms, Terms, check_features


@dataclass(frozen=True)
class RestorationSettings(RestorationTerms):
    """The network and the terms of its loss."""

    network: Literal["unet", "residual"] = setting(
        "unet", "unet sees pictures at several sizes; residual is a stack of blocks at their own size"
    )
    width: int = setting(32, "channels of the first features", at_least=1)
    depth: int = setting(3, "unet: how often features are halved in size", at_least=1)
    num_blocks: int = setting(8, "residual: how many blocks", at_least=1)
    content: Literal["mse", "l1", "charbonnier"] = setting("charbonnier", "how pixels are compared")
    perceptual: float = setting(
        0.0, "weight of the squared difference of VGG19's features; 0 needs no VGG19", at_least=0
    )
    adversarial: float = setting(0.0, "weight of what the discriminator says; 0 has no discriminator", at_least=0)
    tv: float = setting(0.0, "weight of the total variation: squared steps between neighbours, summed", at_least=0)


class Restoration(Recipe):
    """A restorer and, where asked for, a discriminator after it."""

    Settings = RestorationSettings
    evaluator = "restoration"
    best = ("validation/psnr", "max")
    ema = ("restorer",)
    needs = ("target",)
    defaults: ClassVar[dict[str, Any]] = {
        "data": "degraded",
        "crop": 96,
        "batch_size": "16",
        "reference_batch": 16,
        "optimizer": "adam",
        "lr": 2e-4,
        "schedule": "cosine",
        "rot90": "on",
        "epochs": 1000,
        "protocol": "rgb",
        "evaluate_every": "5%",
        "sample_every": "5%",
        "save_every": "5%",
    }
    presets: ClassVar[dict[str, dict[str, Any]]] = {
        # A first look on a CPU: noise taken from the photographs inside scikit-image.
        "quick": {
            "width": 12,
            "depth": 2,
            "crop": 48,
            "lr": 2e-3,
            "images": 8000,
            "evaluate_every": "25%",
            "sample_every": "25%",
            "save_every": "25%",
        },
    }
    small: ClassVar[dict[str, Any]] = {
        "width": 4,
        "depth": 2,
        "num_blocks": 2,
        "d_width": 4,
        "vgg": "random",
        "crop": 32,
        "batch_size": "8",
    }

    @classmethod
    def check(cls, settings: RestorationSettings) -> None:
        check_features(settings)

    def __init__(self, settings: RestorationSettings, spec: DataSpec) -> None:
        super().__init__(settings, spec)
        self.restorer: nn.Module
        if settings.network == "unet":
            self.restorer = UNet(spec.channels, settings.width, settings.depth)
        else:
            self.restorer = SRResNet(
                1, spec.channels, settings.width, settings.num_blocks, norm="none", output="residual"
            )
        self.terms = Terms(settings)
        self.discriminator: Discriminator | None = None
        self.phases = (Phase("restorer", "restorer"),)
        if self.terms.adversarial:
            self.discriminator = self.terms.make_discriminator(spec.channels)
            self.phases += (Phase("discriminator", "discriminator"),)

    def restorer_loss(self, batch: Batch) -> Loss:
        """Restored pictures near the targets; a discriminator then learns from the same ones."""
        return self.terms.generator_loss(self.restorer(batch["image"]), batch["target"], self.discriminator)

    def discriminator_loss(self, batch: Batch) -> Loss:
        """Targets told from restored pictures."""
        assert self.discriminator is not None
        return self.terms.discriminator_loss(self.discriminator, batch["target"], batch["fake"])

    def predict(self, batch: Batch) -> dict[str, Tensor]:
        """The restored picture, the target, and what came in."""
        return {"image": self.restorer(batch["image"]), "target": batch["target"], "input": batch["image"]}

    def preview(self, batch: Batch) -> dict[str, Tensor]:
        """Input, restored, target."""
        made = self.predict(batch)
        return {"input": made["input"], "restored": made["image"], "target": made["target"]}

    def image_to_image(self, pictures: Tensor) -> dict[str, Tensor]:
        """Restored pictures of the same size."""
        return {"image": self.restorer(pictures).clamp(-1, 1)}
