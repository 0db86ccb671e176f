"""Settings, defaults, networks and loss terms of recipes that restore images."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.config.resolve import Arguments
from paceline.config.settings import setting
from paceline.contracts.recipe import Evaluation, Recipe
from paceline.core.errors import UserError, unknown
from paceline.core.types import SettingValues
from paceline.models.features import Features, check_lpips, lpips_loss
from paceline.models.layers import in_full_precision
from paceline.models.losses import fft_loss, ssim_loss
from paceline.models.networks import NetworkChoice, NetworkTask, make_network


def check_colours(setting_text: str, network: str, channels: int) -> None:
    """Raise UserError if a network that was trained on photographs cannot process images with these channels."""
    if channels not in (1, 3):
        name = setting_text.partition("=")[0]
        raise UserError(
            f"{setting_text}: {network} takes images with 1 or 3 channels, not {channels}; use --set {name}=0"
        )


CHARBONNIER_EPSILON = 1e-3  # for differences well below this, the loss is quadratic


@dataclass(frozen=True)
class RestorationLossSettings:
    """Settings for the loss terms and the discriminator."""

    content: Literal["mse", "l1", "charbonnier"] = setting("mse", "pixel loss")
    pixel: float = setting(1.0, "weight of the pixel loss", at_least=0)
    perceptual: float = setting(
        0.006, "weight of the perceptual loss (distance between VGG19 features); 0: VGG19 is not needed", at_least=0
    )
    adversarial: float = setting(1e-3, "weight of the adversarial loss", at_least=0)
    tv: float = setting(
        2e-8, "weight of the total variation loss (squared differences between adjacent pixels)", at_least=0
    )
    objective: Literal["bce", "hinge", "lsgan"] = setting("bce", "adversarial loss")
    vgg: str = setting(
        "", "file with VGG19 weights, or random for an untrained network; default: download torchvision's weights"
    )
    vgg_layer: str = setting(
        "conv5_4",
        "VGG19 layer for the perceptual loss, or several with weights: conv4_4:0.5,conv5_4; relu5_4 is conv5_4 after "
        "its activation",
    )
    perceptual_distance: Literal["mse", "l1"] = setting("mse", "how VGG19 features are compared")
    fft: float = setting(0.0, "weight of the L1 loss between Fourier coefficients", at_least=0)
    ssim: float = setting(
        0.0, "weight of the structural loss, 1 − SSIM; images must have 11×11 pixels or more", at_least=0
    )
    lpips: float = setting(0.0, "weight of the LPIPS distance; needs the package lpips", at_least=0)
    d_width: int = setting(
        64, "channels in the discriminator's first feature map; the last has 8 times as many", at_least=1
    )
    d_norm: Literal["batch", "none"] = setting("batch", "normalisation layers in the discriminator")


class RestorationRecipe(Recipe):
    """A network that restores images, evaluated by PSNR, and an optional discriminator."""

    discriminator: nn.Module | None  # created by the subclass if the weight of the adversarial loss is not 0

    evaluation = Evaluation("restoration", best="validation/psnr")
    defaults: ClassVar[SettingValues] = {
        "crop": 96,
        "batch_size": "16",
        "reference_batch": 16,
        "optimizer": "adam",
        "rot90": "on",
        "epochs": 1000,
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
        """Raise UserError if the weights of VGG19 or LPIPS are needed but cannot be loaded."""
        if settings.perceptual:
            Features(settings.vgg, *parse_layers(settings.vgg_layer)).load()
        if settings.lpips:
            check_lpips()


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


def parse_layers(text: str) -> dict[str, float]:
    """Return the weight of each VGG19 layer in a list such as conv4_4:0.5,conv5_4; the default weight is 1."""
    layers = {}
    for part in text.split(","):
        name, _, weight = part.strip().partition(":")
        try:
            layers[name] = float(weight) if weight else 1.0
        except ValueError:
            raise UserError(f"vgg_layer={text}: {weight!r} is not a number; use for example conv5_4:0.5") from None
    return layers


class ContentLoss:
    """The terms that compare a restored image with its target: pixels, features, frequencies, structure."""

    def __init__(self, settings: RestorationLossSettings, *, perceptual: bool = True) -> None:
        self.pixel, self.tv = settings.pixel, settings.tv
        self.perceptual = settings.perceptual if perceptual else 0.0
        self.pixel_loss = PIXEL_LOSSES[settings.content]
        self.layer_weights = parse_layers(settings.vgg_layer)
        self.features = Features(settings.vgg, *self.layer_weights)
        self.feature_loss = PIXEL_LOSSES[settings.perceptual_distance]
        self.others = {
            name: (weight, loss)
            for name, weight, loss in (
                ("fft", settings.fft, fft_loss),
                ("ssim", settings.ssim, ssim_loss),
                ("lpips", settings.lpips, lpips_loss),
            )
            if weight
        }

    def __bool__(self) -> bool:
        """Return whether a term other than the total variation has a weight."""
        return bool(self.pixel or self.perceptual or self.others)

    def __call__(self, made: Tensor, target: Tensor) -> dict[str, Tensor]:
        """Return the weighted terms; those with weight 0 are not computed."""
        terms = {}
        if self.pixel:
            terms["pixel"] = self.pixel * self.pixel_loss(made, target)
        if self.perceptual:
            terms["perceptual"] = self.perceptual * self._compare_features(made, target)
        for name, (weight, loss) in self.others.items():
            terms[name] = weight * loss(made, target)
        if self.tv:
            terms["tv"] = self.tv * total_variation(made)
        return terms

    def _compare_features(self, made: Tensor, target: Tensor) -> Tensor:
        with torch.no_grad():
            wanted = [in_full_precision(features) for features in self.features.all(target)]
        found = [in_full_precision(features) for features in self.features.all(made)]
        first, *others = (
            weight * self.feature_loss(one, other)
            for weight, one, other in zip(self.layer_weights.values(), found, wanted, strict=True)
        )
        return sum(others, first)


def check_weights(content: ContentLoss, adversarial: float, channels: int) -> None:
    """Raise UserError if all loss weights are zero, or if a network in the loss cannot process the images."""
    if content.perceptual:
        check_colours(f"perceptual={content.perceptual:g}", "VGG19", channels)
    if "lpips" in content.others:
        check_colours(f"lpips={content.others['lpips'][0]:g}", "LPIPS", channels)
    if not (content or adversarial):
        raise UserError("pixel=0: all loss weights are zero; make at least one of them positive, e.g. pixel=1")


def make_image_network(
    name: str, arguments: Arguments, task: NetworkTask, own: Mapping[str, Callable[[], nn.Module]]
) -> nn.Module:
    """Return the recipe's own network of this name, or else the network `PROVIDER:NAME` with these arguments."""
    if ":" in name:
        return make_network(NetworkChoice(name, arguments), task)
    if name not in own:
        raise UserError(f"network={name}: {unknown('network', name, own)} Networks from spandrel: spandrel:NAME")
    if arguments:
        given = next(iter(arguments))
        raise UserError(f"network_args.{given}: only for networks from spandrel, not for network={name}; leave it out")
    return own[name]()
