"""Checks that the networks for image translation fit the images, and builds generators."""

from __future__ import annotations

from typing import Literal, TypeAlias

from torch import nn

from paceline.contracts.recipe import DataSpec
from paceline.core.errors import UserError
from paceline.models.layers import Norm
from paceline.models.patchgan import smallest_side_px
from paceline.models.resnet_generator import MULTIPLE_PX, Padding, ResnetGenerator
from paceline.models.unet_generator import UnetGenerator

GeneratorKind: TypeAlias = Literal[
    "auto", "resnet_9", "resnet_6", "unet_512", "unet_256", "unet_128", "unet_64", "unet_32"
]
UNETS_PX = (512, 256, 128, 64, 32)


def largest_fitting_unet(spec: DataSpec) -> str:
    """Return the largest U-Net whose total downsampling factor divides the image sides; if none does, resnet_9."""
    fitting = [f"unet_{side}" for side in UNETS_PX if spec.height % side == spec.width % side == 0]
    return fitting[0] if fitting else "resnet_9"


def multiple_px(kind: str) -> int:
    """Return the number of pixels that must divide both sides of a generator's input."""
    family, _, number = kind.partition("_")
    return int(number) if family == "unet" else MULTIPLE_PX


def check_generator(setting_name: str, kind: str, spec: DataSpec) -> None:
    """Raise UserError if a generator does not fit the training images."""
    multiple = multiple_px(kind)
    if spec.height % multiple or spec.width % multiple:
        raise UserError(
            f"{setting_name}={kind}: needs sides that are multiples of {multiple}, but the training images are "
            f"{spec.width}×{spec.height}; change --crop, or choose a different generator"
        )


def check_discriminator(num_layers: int, spec: DataSpec) -> None:
    """Raise UserError if the training images are too small for a discriminator."""
    if min(spec.height, spec.width) < smallest_side_px(num_layers):
        raise UserError(
            f"d_layers={num_layers}: needs at least {smallest_side_px(num_layers)} pixels per side, but the training "
            f"images are {spec.width}×{spec.height}: use fewer layers (--set d_layers=1) or a larger --crop"
        )


def make_generator(kind: str, channels: int, ngf: int, norm: Norm, dropout: float, padding: Padding) -> nn.Module:
    """Return an image-to-image generator."""
    family, _, number = kind.partition("_")
    if family == "unet":
        return UnetGenerator(channels, channels, ngf, int(number).bit_length() - 1, norm, dropout)
    return ResnetGenerator(channels, channels, ngf, int(number), norm, dropout, padding)
