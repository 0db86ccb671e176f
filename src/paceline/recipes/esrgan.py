"""ESRGAN and Real-ESRGAN: a deep network upscales photographs 2 or 4 times and is trained to look realistic.

Wang et al., ESRGAN: Enhanced Super-Resolution Generative Adversarial Networks (2018), and Real-ESRGAN: Training
Real-World Blind Super-Resolution with Pure Synthetic Data (2021). Stage `pretrain` trains RRDBNet with a pixel loss.
Stage `adversarial` starts from those weights (`--init-from`) and adds a discriminator and VGG19 features. `both` runs
the two stages in sequence. The low-resolution images are downsampled crops (`degradation=bicubic`), or crops that are
blurred, resized, made noisy and compressed twice (`degradation=second_order`), computed on the device.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from paceline.config.settings import setting
from paceline.contracts.recipe import Batch, DataSpec, Draw, Weights
from paceline.core.errors import UserError
from paceline.core.types import SettingValues
from paceline.images.degradation.second_order import (
    FIRST,
    NUM_NUMBERS,
    SECOND,
    Round,
    degrade,
)
from paceline.models.esrgan import SIDES_MULTIPLE_OF, RRDBNet, UNetDiscriminator
from paceline.models.srresnet import Discriminator
from paceline.recipes.parts.restoration import QUICK, UpscalingRecipe, UpscalingSettings, check_sides

DEGRADATION_SETTINGS = ("degradation", "degradation_order", "max_blur", "max_noise", "max_poisson", "min_jpeg")
ADVERSARIAL: SettingValues = {  # what the adversarial stages of both papers have in common
    "stage": "adversarial",
    "scale": "4",
    "content": "l1",
    "perceptual_distance": "l1",
    "vgg_layer": "conv5_4",
    "lr": 1e-4,
    "schedule": "step",
    "gamma": 0.5,
}


@dataclass(frozen=True)
class EsrganSettings(UpscalingSettings):
    """The stage, the networks, their loss terms and the degradation."""

    scale: Literal["2", "4"] = setting("4", "upscaling factor for height and width")
    num_blocks: int = setting(23, "number of residual-in-residual dense blocks in the generator", at_least=1)
    width: int = setting(64, "feature channels in the generator", at_least=1)
    growth: int = setting(32, "channels that each convolution adds inside a dense block", at_least=1)
    output: Literal["image", "residual"] = setting(
        "image",
        "image: the output is the upscaled image, as in ESRGAN; residual: the output is added to a bicubic upscaling",
    )
    relativistic: bool = setting(
        True,
        "the discriminator compares each real image with its upscaled version instead of rating them separately",
    )
    logits: Literal["image", "pixel"] = setting(
        "image", "output of the discriminator: one logit per image (as in SRGAN), or one per pixel (a U-Net)"
    )
    degradation: Literal["bicubic", "second_order"] = setting(
        "bicubic",
        "how low-resolution images are made: bicubic downsampling, or two rounds of blur, resizing, noise and JPEG",
    )
    degradation_order: Literal["fixed", "random"] = setting(
        "fixed", "second_order: blur, resizing and noise have this order; `random` only occurs in older runs"
    )
    max_blur: float = setting(3.0, "second_order: largest sigma of the first blur in px; the second uses half", above=0)
    max_noise: float = setting(
        30.0,
        "second_order: largest standard deviation of the first Gaussian noise, on a scale from 0 to 255",
        at_least=0,
    )
    max_poisson: float = setting(3.0, "second_order: largest factor of the first Poisson noise", at_least=0)
    min_jpeg: int = setting(30, "second_order: lowest JPEG quality; the highest is 95", at_least=1, at_most=95)


class Esrgan(UpscalingRecipe):
    """RRDBNet and, in the adversarial stage, a discriminator."""

    Settings = EsrganSettings
    weights = Weights("esrgan", must_match=("scale", "output"))
    defaults = {**UpscalingRecipe.defaults, "data": "photos", "lr": 1e-4, "content": "l1", "tv": 0.0, "crop": 128}
    presets = {
        # A run this short cannot learn to copy the image: hence `residual`.
        "quick": {
            **QUICK,
            "scale": "2",
            "num_blocks": 1,
            "width": 16,
            "growth": 8,
            "output": "residual",
            "schedule": "cosine",
        },
        # The adversarial stage of ESRGAN. The paper's weight of the pixel loss is 0.01 for images in 0…1.
        "esrgan": {
            **ADVERSARIAL,
            "pixel": 0.005,
            "perceptual": 1.0,
            "adversarial": 0.005,
            "crop": 128,
            "batch_size": "16",
            "reference_batch": 16,
            "images": 6_400_000,
            "milestones": "12.5%,25%,50%,75%",
        },
        # The adversarial stage of Real-ESRGAN. The paper's weight of the pixel loss is 1 for images in 0…1. The EMA's
        # half-life equals a decay of 0.999 per step.
        "real_esrgan": {
            **ADVERSARIAL,
            "degradation": "second_order",
            "logits": "pixel",
            "relativistic": False,
            "pixel": 0.5,
            "perceptual": 1.0,
            "vgg_layer": "conv1_2:0.1,conv2_2:0.1,conv3_4,conv4_4,conv5_4",
            "adversarial": 0.1,
            "crop": 256,
            "batch_size": "48",
            "reference_batch": 48,
            "images": 19_200_000,
            "schedule": "constant",
            "ema_half_life": "33264 images",
        },
    }
    small = {**UpscalingRecipe.small, "scale": "2", "num_blocks": 1, "growth": 2}

    def __init__(self, settings: EsrganSettings, spec: DataSpec) -> None:
        super().__init__(settings, spec)
        self.relativistic, per_pixel = settings.relativistic, settings.logits == "pixel"
        _check(settings, spec, per_pixel=per_pixel and bool(self.adversarial))
        self.generator = RRDBNet(
            self.output_scale, spec.channels, settings.width, settings.num_blocks, settings.growth, settings.output
        )
        if self.adversarial:
            self.add_discriminator(
                UNetDiscriminator(spec.channels, settings.d_width)
                if per_pixel
                else Discriminator(spec.channels, settings.d_width, settings.d_norm)
            )
        self.rounds = _rounds(settings)
        if settings.degradation == "second_order":
            self.draws = {"degradation": Draw((NUM_NUMBERS,), "uniform")}
            conditions = {name: getattr(settings, name) for name in DEGRADATION_SETTINGS}
            self.evaluation = dataclasses.replace(self.evaluation, conditions=conditions)

    def degrade(self, high: Tensor, batch: Batch) -> Tensor:
        """Return low-resolution images: downsampled (bicubic) or, with `second_order`, degraded as real photographs."""
        if "degradation" not in self.draws:
            return super().degrade(high, batch)
        return degrade(high, batch["degradation"], self.output_scale, *self.rounds)


def _check(settings: EsrganSettings, spec: DataSpec, *, per_pixel: bool) -> None:
    """Raise UserError if the data does not fit the degradation or the discriminator."""
    if spec.scale and settings.degradation == "second_order":
        raise UserError(
            "degradation=second_order: not supported with low-resolution files, which are already degraded; "
            "use --set degradation=bicubic, or remove --low-root"
        )
    if settings.degradation == "second_order" and (spec.channels not in (1, 3) or spec.dtype != "uint8"):
        raise UserError(
            "degradation=second_order: simulates 8-bit JPEG files with 1 or 3 channels, but the images are "
            f"{spec.pixel_format} with {spec.channels} channels; use --set degradation=bicubic"
        )
    if settings.degradation == "second_order" and settings.degradation_order == "random":
        raise UserError("degradation_order=random: no longer supported; use --set degradation_order=fixed")
    if per_pixel:
        check_sides(spec, SIDES_MULTIPLE_OF, "logits=pixel")


def _rounds(settings: EsrganSettings) -> tuple[Round, Round]:
    """Return the two rounds of degradation, with the settings' ranges; the second round is weaker, as in the paper."""
    factors = {
        "max_blur_sigma": settings.max_blur / FIRST.max_blur_sigma,
        "max_noise_sigma": settings.max_noise / FIRST.max_noise_sigma,
        "max_poisson": settings.max_poisson / FIRST.max_poisson,
    }

    def scaled(default: Round) -> Round:
        ranges = {name: getattr(default, name) * factor for name, factor in factors.items()}
        return dataclasses.replace(default, **ranges, jpeg_quality=(settings.min_jpeg, default.jpeg_quality[1]))

    return scaled(FIRST), scaled(SECOND)
