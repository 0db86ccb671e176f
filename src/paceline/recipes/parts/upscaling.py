"""Settings, checks and predictions shared by recipes that upscale images, with or without a discriminator."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch.nn.functional as F
from torch import Tensor, nn

from paceline.config.settings import setting
from paceline.contracts.recipe import Batch, DataSpec, Phase
from paceline.core.errors import UserError
from paceline.images.rectangles import in_windows
from paceline.images.resample import bicubic, bicubic_as_saved, cut_to_multiple
from paceline.models.features import check_lpips
from paceline.models.losses import OBJECTIVES
from paceline.recipes.parts.other_names import SUPER_RESOLUTION
from paceline.recipes.parts.restoration import ContentLoss, RestorationLossSettings, RestorationRecipe, check_weights


@dataclass(frozen=True)
class UpscalingSettings(RestorationLossSettings):
    """The stage, the scale and the loss terms."""

    stage: Literal["pretrain", "adversarial", "both"] = setting(
        "pretrain",
        "pretrain: pixel loss only; adversarial: also a discriminator and VGG19; both: pretrain, then adversarial",
    )
    scale: Literal["2", "3", "4", "8"] = setting("4", "upscaling factor for height and width")


class UpscalingRecipe(RestorationRecipe):
    """A generator that upscales images by `output_scale` and, in the adversarial stage, a discriminator.

    The constructor creates everything except the networks. A subclass creates `generator`, and it calls
    `add_discriminator` if the weight `adversarial` is not 0.
    """

    generator: nn.Module

    stages = {"both": ("pretrain", "adversarial")}
    rejected_fields = {"target": "restoration"}
    ema = ("generator",)
    other_names = SUPER_RESOLUTION

    @classmethod
    def check(cls, settings: RestorationLossSettings) -> None:
        """Raise UserError if a stage needs weights of VGG19 or LPIPS that cannot be loaded."""
        assert isinstance(settings, UpscalingSettings)
        if settings.stage != "pretrain":
            super().check(settings)
        elif settings.lpips:
            check_lpips()

    def __init__(self, settings: UpscalingSettings, spec: DataSpec) -> None:
        super().__init__(settings, spec)
        self.output_scale, self.pixels = int(settings.scale), spec.pixel_format
        self._check_stage_and_scale(settings, spec)
        is_adversarial = settings.stage == "adversarial"
        self.content_loss = ContentLoss(settings, perceptual=is_adversarial)
        self.objective, self.adversarial = OBJECTIVES[settings.objective], settings.adversarial * is_adversarial
        check_weights(self.content_loss, self.adversarial, spec.channels)
        self.discriminator = None
        self.phases = (Phase("generator", "generator"),)
        if is_adversarial:
            self.evaluation = replace(
                self.evaluation, best=""
            )  # sharper images have a lower PSNR: the last one is best

    def _check_stage_and_scale(self, settings: UpscalingSettings, spec: DataSpec) -> None:
        """Raise UserError if the stage is `both`, which needs two runs, or if the data does not fit the scale."""
        if settings.stage in self.stages:
            raise UserError(
                f"stage={settings.stage}: consists of several runs; choose {' or '.join(self.stages[settings.stage])}"
            )
        if spec.scale not in (0, self.output_scale):
            raise UserError(
                f"scale={settings.scale}: the low-resolution files are smaller by a factor of {spec.scale}; "
                "set scale to this factor, or use different files"
            )
        check_sides(spec, self.output_scale, f"scale={settings.scale}")

    def add_discriminator(self, discriminator: nn.Module) -> None:
        """Add the network that distinguishes real images from upscaled ones, and its phase."""
        self.discriminator = discriminator
        self.phases += (Phase("discriminator", "discriminator"),)

    def degrade(self, high: Tensor, batch: Batch) -> Tensor:
        """Return low-resolution images, rounded as in a file; by default, downsampled (bicubic)."""
        height, width = high.shape[-2:]
        return bicubic_as_saved(high, height // self.output_scale, width // self.output_scale, self.pixels)

    def low_resolution(self, batch: Batch) -> Tensor:
        """Return the generator's input: the source's low-resolution images, or images from `degrade`."""
        if "low" in batch:
            return batch["low"]
        return self.degrade(cut_to_multiple(batch["image"], self.output_scale), batch)

    def predict(self, batch: Batch) -> dict[str, Tensor]:
        """Return the upscaled image, the original, and the bicubic upscaling of the same low-resolution image."""
        low, target = self.low_resolution(batch), cut_to_multiple(batch["image"], self.output_scale)
        upscaled = in_windows(lambda part: {"image": self.generator(part)}, low, self.window_px, self.output_scale)
        return {**upscaled, "target": target, "bicubic": bicubic(low, *target.shape[-2:])}

    def preview(self, batch: Batch) -> dict[str, Tensor]:
        """Return the low-resolution image (enlarged), the bicubic upscaling, the restored image and the target."""
        made = self.predict(batch)
        low = F.interpolate(self.low_resolution(batch), scale_factor=self.output_scale, mode="nearest")
        return {"low": low, "bicubic": made["bicubic"], "restored": made["image"], "target": made["target"]}

    def image_to_image(self, images: Tensor) -> dict[str, Tensor]:
        """Return images `output_scale` times as high and wide."""
        return {"image": self.generator(images).clamp(-1, 1)}


def check_sides(spec: DataSpec, multiple: int, reason: str) -> None:
    """Raise UserError unless both sides of the training images are multiples of a number."""
    if spec.height % multiple or spec.width % multiple:
        raise UserError(
            f"the training images are {spec.width}×{spec.height} pixels, but both sides must be multiples of "
            f"{multiple} for {reason}: use --crop 96"
        )
