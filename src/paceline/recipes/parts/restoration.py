"""What the recipes that restore pictures have in common: the terms of their losses, and their settings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.config.settings import setting
from paceline.contracts.recipe import Loss
from paceline.core.errors import UserError
from paceline.models.features import Features
from paceline.models.layers import in_full_precision
from paceline.models.losses import OBJECTIVES
from paceline.models.srresnet import Discriminator
from paceline.recipes.parts.adversarial import score

CHARBONNIER_EPSILON = 1e-3  # below this a difference counts squared


@dataclass(frozen=True)
class RestorationTerms:
    """What a restored picture is compared by."""

    content: Literal["mse", "l1", "charbonnier"] = setting("mse", "how pixels are compared")
    pixel: float = setting(1.0, "weight of the difference of pixels", at_least=0)
    perceptual: float = setting(
        0.006, "weight of the squared difference of VGG19's features; 0 needs no VGG19", at_least=0
    )
    adversarial: float = setting(1e-3, "weight of what the discriminator says", at_least=0)
    tv: float = setting(2e-8, "weight of the total variation: squared steps between neighbours, summed", at_least=0)
    objective: Literal["bce", "hinge", "lsgan"] = setting("bce", "what generator and discriminator compete for")
    vgg: str = setting(
        "", "file with VGG19's weights, or random for an untrained network; default: torchvision's, downloaded"
    )
    vgg_layer: str = setting("conv5_4", "layer of VGG19 that is compared; relu5_4 is the same after its activation")
    d_width: int = setting(
        64, "channels of the discriminator's first features; the last have 8 times as many", at_least=1
    )
    d_norm: Literal["batch", "none"] = setting("batch", "normalisation layers of the discriminator")


def charbonnier(made: Tensor, wanted: Tensor) -> Tensor:
    """The mean of √(d² + ε²): an L1 distance that is smooth at zero."""
    return ((made - wanted).square() + CHARBONNIER_EPSILON**2).sqrt().mean()


CONTENT: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mse": F.mse_loss,
    "l1": F.l1_loss,
    "charbonnier": charbonnier,
}


def total_variation(pictures: Tensor) -> Tensor:
    """The squares of all steps between neighbouring pixels, summed over a picture; the mean over pictures."""
    rows, columns = pictures.diff(dim=-2).square().sum(), pictures.diff(dim=-1).square().sum()
    return (rows + columns) / len(pictures)


def check_features(settings: RestorationTerms) -> None:
    """Refuses a file of VGG19's weights that cannot be used, where one is needed."""
    if settings.perceptual:
        Features(settings.vgg, settings.vgg_layer).load()


class Terms:
    """The terms of a restoring network's loss; those with weight zero are left out, and cost nothing."""

    def __init__(self, settings: RestorationTerms, *, pixels_only: bool = False) -> None:
        self.settings, self.objective = settings, OBJECTIVES[settings.objective]
        self.adversarial = 0.0 if pixels_only else settings.adversarial
        self.perceptual = 0.0 if pixels_only else settings.perceptual
        self.features = Features(settings.vgg, settings.vgg_layer)
        if not (settings.pixel or self.perceptual or self.adversarial):
            raise UserError("pixel=0: the loss has no term with a weight; use pixel=1")

    def make_discriminator(self, channels: int) -> Discriminator:
        """The network that tells real pictures from restored ones."""
        return Discriminator(channels, self.settings.d_width, self.settings.d_norm)

    def of_pictures(self, made: Tensor, wanted: Tensor) -> dict[str, Tensor]:
        """How far pictures are from those wanted, in what has a weight."""
        weights, terms = self.settings, {}
        if weights.pixel:
            terms["pixel"] = weights.pixel * CONTENT[weights.content](made, wanted)
        if self.perceptual:
            with torch.no_grad():
                seen = in_full_precision(self.features(wanted))
            terms["perceptual"] = self.perceptual * F.mse_loss(in_full_precision(self.features(made)), seen)
        if weights.tv:
            terms["tv"] = weights.tv * total_variation(made)
        return terms

    def generator_loss(self, made: Tensor, wanted: Tensor, discriminator: Discriminator | None) -> Loss:
        """Pictures near those wanted and, where there is a discriminator, taken for real by it."""
        terms = self.of_pictures(made, wanted)
        if discriminator is None:
            return Loss(terms)
        logits = discriminator(made)
        terms["adversarial"] = self.adversarial * self.objective.generator(logits).mean()
        return Loss(terms, {"fake": made}, {"fake_score": score(logits)})

    def discriminator_loss(self, discriminator: Discriminator, real: Tensor, fake: Tensor) -> Loss:
        """Real pictures told from restored ones; each pass has BatchNorm statistics of its own."""
        on_real, on_fake = discriminator(real), discriminator(fake)
        terms = {"real": self.objective.real(on_real).mean(), "fake": self.objective.fake(on_fake).mean()}
        return Loss(terms, signals={"real_score": score(on_real), "fake_score": score(on_fake)})
