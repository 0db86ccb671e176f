"""Restored images compared with the originals: PSNR, SSIM, and LPIPS if its package is installed.

Both images are first rounded as in image files: to 8 or 16 bits, or not at all for floating-point pixels. Protocol `y`
compares luma (16…235, as MATLAB's rgb2ycbcr computes it, not rounded again); `rgb` compares all channels. Images with
neither 1 nor 3 channels are always compared in all channels (`all`). When upscaling, a border as wide as the scale is
ignored. Each metric is computed per image and then averaged. The data range of PSNR and SSIM is 255, 65535 or
the length of the declared range. SSIM has a Gaussian window of 11 pixels with σ = 1.5, K = 0.01
and 0.03, and uses only pixels whose window lies inside the image. If a recipe also predicts a baseline (bicubic, the
input), the baseline is measured in the same way. LPIPS is measured on a scale of 0 to 255, only for images with 1 or 3
channels.
"""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.config.settings import RunSettings
from paceline.contracts.recipe import Batch, DataSpec
from paceline.evaluation.contract import Case
from paceline.evaluation.image_metrics import (
    PEAK,
    SIGMA,
    WINDOW,
    ImageEvaluator,
    check_sizes,
    describe_rounding,
    luma,
    perceptual_distance,
    protocol_label,
    psnr,
    ssim,
    to_levels,
)
from paceline.evaluation.protocol import Protocol


class Restoration(ImageEvaluator):
    """Mean PSNR, SSIM and LPIPS for restored images and baselines."""

    compared = ("image", "bicubic", "input")  # fields of a prediction that are compared with the target
    metrics = ("psnr", "ssim", "lpips")

    def __init__(self, case: Case, spec: DataSpec, device: torch.device, settings: RunSettings) -> None:
        super().__init__(case, spec, device, settings)
        is_colour = spec.channels in (1, 3)
        self.label = protocol_label(settings.protocol, spec.channels)
        self.border = case.output_scale if case.output_scale > 1 else 0
        check_sizes(case, self.border)
        self.distance, self.notes = None, ("LPIPS is not measured, because the images are evaluated by region",)
        if not case.by_region:
            self.distance, self.notes = perceptual_distance(device) if is_colour else (None, ())
        self.measured = {"psnr", "ssim"} | ({"lpips"} if self.distance else set())

    def protocol(self) -> Protocol:
        return {
            "protocol": self.label,
            "border": self.border,
            **describe_rounding(self.pixels),
            "ssim": f"gaussian window {WINDOW}, sigma {SIGMA}",
            "lpips": "alex" if self.distance else "not measured",
        }

    def update(self, prediction: dict[str, Tensor], batch: Batch) -> None:
        target, scale = to_levels(prediction["target"], self.pixels), PEAK / self.pixels.span
        for name in self.compared:
            if name not in prediction:
                continue
            made = to_levels(prediction[name], self.pixels)
            assert made.shape == target.shape, f"shape of {name}: {made.shape}; shape of its target: {target.shape}"
            border, (height, width) = self.border, made.shape[-2:]
            inside = (..., slice(border, height - border), slice(border, width - border))
            one, other = (self._channels(images[inside]) for images in (made, target))
            values = [metric(one, other, self.pixels.span) for metric in (psnr, ssim)]
            none = torch.zeros_like(values[0])
            # LPIPS is defined on a scale from 0 to 255.
            values.append(self.distance(made * scale, target * scale) if self.distance else none)
            self.add_images(name, values)

    def pairs(self, prediction: dict[str, Tensor], batch: Batch) -> dict[str, tuple[Tensor, Tensor]]:
        levels = {name: self._channels(to_levels(images, self.pixels)) for name, images in prediction.items()}
        return {name: (levels[name], levels["target"]) for name in self.compared if name in levels}

    def _channels(self, levels: Tensor) -> Tensor:
        return luma(levels, self.pixels.span) if self.label == "y" else levels

    def sums(self) -> Tensor:
        return self.table.flatten().clone()

    def results(self, sums: Tensor) -> dict[str, float]:
        means = self.means(sums)
        results = {
            f"{'' if name == 'image' else f'{name}_'}{metric}[{self.label}]": values[metric]
            for name, values in means.items()
            for metric in self.metrics
            if metric in self.measured
        }
        return results | {"count": means["image"]["count"]}
