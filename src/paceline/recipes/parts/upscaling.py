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
from paceline.recipes.parts.other_names import SUPER_RESOLUTION
from paceline.recipes.parts.restoration import RestorationLossSettings, RestorationRecipe


@dataclass(frozen=True)
class UpscalingSettings(RestorationLossSettings):
    """The stage, the scale and the loss terms."""

    stage: Literal["pretrain", "adversarial", "both"] = setting(
        "pretrain",
        "pretrain: pixel loss only; adversarial: also a discriminator and VGG19; both: pretrain, then adversarial",
    )
    scale: Literal["2", "3", "4", "8"] = setting("4", "upscaling factor for height and width")


class UpscalingRecipe(RestorationRecipe):
    """A generator that upscales images by `output_scale` and, in the adversarial stage, a discriminator."""

    generator: nn.Module

    stages = {"both": ("pretrain", "adversarial")}
    rejected_fields = {"target": "restoration"}
    phases = (Phase("generator", "generator"),)
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
        if settings.stage in self.stages:
            raise UserError(
                f"stage={settings.stage}: consists of several runs; choose {' or '.join(self.stages[settings.stage])}"
            )
        if spec.scale not in (0, int(settings.scale)):
            raise UserError(
                f"scale={settings.scale}: the low-resolution files are smaller by a factor of {spec.scale}; "
                "set scale to this factor, or use different files"
            )
        check_sides(spec, int(settings.scale), f"scale={settings.scale}")
        is_adversarial = settings.stage == "adversarial"
        super().__init__(settings, spec, is_adversarial=is_adversarial)
        self.output_scale, self.pixels = int(settings.scale), spec.pixel_format
        if is_adversarial:
            self.evaluation = replace(
                self.evaluation, best=""
            )  # sharper images have a lower PSNR: the last one is best

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
        prediction = self.predict(batch)
        low = F.interpolate(self.low_resolution(batch), scale_factor=self.output_scale, mode="nearest")
        return {
            "low": low,
            "bicubic": prediction["bicubic"],
            "restored": prediction["image"],
            "target": prediction["target"],
        }

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
