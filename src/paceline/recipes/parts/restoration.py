"""Settings, defaults and loss terms shared by recipes that restore images."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.config.settings import setting
from paceline.contracts.recipe import Best, Recipe
from paceline.core.errors import UserError
from paceline.core.types import SettingValues
from paceline.models.features import Features
from paceline.models.layers import in_full_precision
from paceline.models.srresnet import Discriminator

CHARBONNIER_EPSILON = 1e-3  # for differences well below this, the loss is quadratic


@dataclass(frozen=True)
class RestorationLossSettings:
    """Settings for the loss terms and the discriminator."""

    content: Literal["mse", "l1", "charbonnier"] = setting("mse", "pixel loss")
    pixel: float = setting(1.0, "weight of the pixel loss", at_least=0)
    perceptual: float = setting(
        0.006, "weight of the perceptual loss (MSE between VGG19 features); 0: VGG19 is not needed", at_least=0
    )
    adversarial: float = setting(1e-3, "weight of the adversarial loss", at_least=0)
    tv: float = setting(
        2e-8, "weight of the total variation loss (squared differences between adjacent pixels)", at_least=0
    )
    objective: Literal["bce", "hinge", "lsgan"] = setting("bce", "adversarial loss")
    vgg: str = setting(
        "", "file with VGG19 weights, or random for an untrained network; default: download torchvision's weights"
    )
    vgg_layer: str = setting("conv5_4", "VGG19 layer for the perceptual loss; relu5_4 is conv5_4 after its activation")
    d_width: int = setting(
        64, "channels in the discriminator's first feature map; the last has 8 times as many", at_least=1
    )
    d_norm: Literal["batch", "none"] = setting("batch", "normalisation layers in the discriminator")


class RestorationRecipe(Recipe):
    """A network that restores images, evaluated by PSNR, and an optional discriminator."""

    discriminator: Discriminator | None  # created by the subclass if the weight of the adversarial loss is not 0

    evaluator = "restoration"
    best = Best("validation/psnr", "max")
    defaults: ClassVar[SettingValues] = {
        "crop": 96,
        "batch_size": "16",
        "reference_batch": 16,
        "optimizer": "adam",
        "rot90": "on",
        "epochs": 1000,
        "evaluate_every": "5%",
        "sample_every": "5%",
        "save_every": "5%",
    }
    small: ClassVar[SettingValues] = {
        "num_blocks": 2,
        "width": 4,
        "d_width": 4,
        "vgg": "random",
        "crop": 32,
        "batch_size": "8",
    }

    @classmethod
    def check(cls, settings: RestorationLossSettings) -> None:
        """Raise UserError if VGG19 weights are needed but cannot be loaded."""
        if settings.perceptual:
            Features(settings.vgg, settings.vgg_layer).load()


def charbonnier(made: Tensor, target: Tensor) -> Tensor:
    """Return the mean of √(d² + ε²): an L1 loss that is smooth at zero."""
    return ((made - target).square() + CHARBONNIER_EPSILON**2).sqrt().mean()


PIXEL_LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mse": F.mse_loss,
    "l1": F.l1_loss,
    "charbonnier": charbonnier,
}


def total_variation(images: Tensor) -> Tensor:
    """Return the sum of squared differences between adjacent pixels in an image, averaged over images."""
    rows, columns = images.diff(dim=-2).square().sum(), images.diff(dim=-1).square().sum()
    return (rows + columns) / len(images)


class ContentLoss:
    """The terms that compare a restored image with its target: pixel, perceptual and total variation."""

    def __init__(self, settings: RestorationLossSettings, *, perceptual: bool = True) -> None:
        self.pixel, self.tv = settings.pixel, settings.tv
        self.perceptual = settings.perceptual if perceptual else 0.0
        self.pixel_loss = PIXEL_LOSSES[settings.content]
        self.features = Features(settings.vgg, settings.vgg_layer)

    def __call__(self, made: Tensor, target: Tensor) -> dict[str, Tensor]:
        """Return the weighted terms; those with weight 0 are not computed."""
        terms = {}
        if self.pixel:
            terms["pixel"] = self.pixel * self.pixel_loss(made, target)
        if self.perceptual:
            with torch.no_grad():
                target_features = in_full_precision(self.features(target))
            terms["perceptual"] = self.perceptual * F.mse_loss(in_full_precision(self.features(made)), target_features)
        if self.tv:
            terms["tv"] = self.tv * total_variation(made)
        return terms


def check_weights(content: ContentLoss, adversarial: float) -> None:
    """Raise UserError if all loss weights are zero."""
    if not (content.pixel or content.perceptual or adversarial):
        raise UserError("pixel=0: all loss weights are zero; make at least one of them positive, e.g. pixel=1")
