"""Restored images compared with the originals: PSNR, SSIM, LPIPS if its package is installed, and NIQE on request.

Both images are first rounded as in image files: to 8 or 16 bits, or not at all for floating-point pixels. Protocol `y`
compares luma (16…235, as MATLAB's rgb2ycbcr computes it, not rounded again); `rgb` compares all channels. Images with
neither 1 nor 3 channels are always compared in all channels (`all`). When upscaling, a border as wide as the scale is
ignored. Each metric is computed per image and then averaged. The data range of PSNR and SSIM is 255, 65535 or
the length of the declared range. SSIM has a Gaussian window of 11 pixels with σ = 1.5, K = 0.01
and 0.03, and uses only pixels whose window lies inside the image. If a recipe also predicts a baseline (bicubic, the
input), the baseline is measured in the same way. LPIPS and NIQE are measured on a scale of 0 to 255, only for images
with 1 or 3 channels.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from paceline.config.settings import RunSettings
from paceline.contracts.recipe import Batch, DataSpec
from paceline.core.errors import UserError
from paceline.data.source import sizes_of
from paceline.evaluation.contract import Case, Evaluator, MeasuredByRegion, Quality
from paceline.evaluation.image_metrics import (
    PEAK,
    PROTOCOL,
    SIGMA,
    WINDOW,
    check_niqe_size,
    check_sizes,
    describe_rounding,
    luma,
    niqe,
    perceptual_distance,
    protocol_label,
    psnr,
    ssim,
    to_levels,
)
from paceline.evaluation.protocol import Protocol

MEASURED = ("image", "bicubic", "input")  # fields of a prediction that are compared with the target
METRICS = ("psnr", "ssim", "lpips", "niqe")


class Restoration(Evaluator, MeasuredByRegion):
    """Mean PSNR, SSIM, LPIPS and NIQE for restored images and baselines."""

    def __init__(self, case: Case, spec: DataSpec, device: torch.device, settings: RunSettings) -> None:
        super().__init__(case, spec, device, settings)
        self.pixels, self.is_colour = case.source.spec.pixel_format, spec.channels in (1, 3)
        self.label = protocol_label(settings.protocol, spec.channels)
        self.border = case.output_scale if case.output_scale > 1 else 0
        check_sizes(case, self.border)
        self.distance, self.notes = None, ("LPIPS is not measured, because the images are evaluated by region",)
        if not case.by_region:
            self.distance, self.notes = perceptual_distance(device) if self.is_colour else (None, ())
        self.measured = {"psnr", "ssim"} | ({"lpips"} if self.distance else set())
        if settings.niqe and case.by_region:
            raise UserError("niqe=on: not supported by region; use --set niqe=off")
        if settings.niqe and not self.is_colour:
            raise UserError(f"niqe=on: needs images with 1 or 3 channels, not {spec.channels}; use --set niqe=off")
        if settings.niqe:
            self.measured.add("niqe")
            for index, (height, width) in enumerate(sizes_of(case.source).tolist()):
                check_niqe_size(height, width, case.source.name_of(index))
        self._sums = torch.zeros(len(MEASURED), len(METRICS) + 1, dtype=torch.float64, device=device)

    def protocol(self) -> Protocol:
        return {
            "protocol": self.label,
            "border": self.border,
            **describe_rounding(self.pixels),
            "ssim": f"gaussian window {WINDOW}, sigma {SIGMA}",
            "lpips": "alex" if self.distance else "not measured",
            **({"niqe": PROTOCOL} if "niqe" in self.measured else {}),
        }

    def update(self, prediction: dict[str, Tensor], batch: Batch) -> None:
        target = to_levels(prediction["target"], self.pixels)
        for number, name in enumerate(MEASURED):
            if name not in prediction:
                continue
            made = to_levels(prediction[name], self.pixels)
            assert made.shape == target.shape, f"shape of {name}: {made.shape}; shape of its target: {target.shape}"
            one, other = (self._compared(images) for images in (made, target))
            values = [metric(one, other, self.pixels.span) for metric in (psnr, ssim)]
            none = torch.zeros_like(values[0])
            values.append(self.distance(self._shown(made), self._shown(target)) if self.distance else none)
            values.append(niqe(self._shown(made)) if "niqe" in self.measured else none)
            values.append(torch.ones_like(values[0]))
            self._sums[number] += torch.stack(values).sum(dim=1)

    @property
    def compared(self) -> tuple[str, ...]:
        return MEASURED

    def pairs(self, prediction: dict[str, Tensor], batch: Batch) -> dict[str, tuple[Tensor, Tensor]]:
        levels = {name: self._channels(to_levels(images, self.pixels)) for name, images in prediction.items()}
        return {name: (levels[name], levels["target"]) for name in MEASURED if name in levels}

    def add_region(self, pairs: Mapping[str, tuple[Tensor, Tensor]]) -> None:
        """Do nothing, since all metrics are computed per image."""

    def add_image(self, qualities: Mapping[str, Quality]) -> None:
        for name, quality in qualities.items():
            values = torch.tensor([*quality, 0.0, 0.0, 1.0], dtype=torch.float64)
            self._sums[MEASURED.index(name)] += values.to(self._sums.device)

    def _compared(self, levels: Tensor) -> Tensor:
        """Return the region and the channels that the protocol compares."""
        border, (height, width) = self.border, levels.shape[-2:]
        return self._channels(levels[..., border : height - border, border : width - border])

    def _channels(self, levels: Tensor) -> Tensor:
        return luma(levels, self.pixels.span) if self.label == "y" else levels

    def _shown(self, levels: Tensor) -> Tensor:
        """Return levels on a scale from 0 to 255."""
        return levels if self.pixels.span == PEAK else levels * (PEAK / self.pixels.span)

    def sums(self) -> Tensor:
        return self._sums.flatten().clone()

    def results(self, sums: Tensor) -> dict[str, float]:
        table = dict(zip(MEASURED, sums.view(len(MEASURED), -1).tolist(), strict=True))
        assert table["image"][-1] > 0, "cannot compute the PSNR of an empty split"
        results = {}
        for name, (*totals, count) in table.items():
            prefix = "" if name == "image" else f"{name}_"
            for metric, total in zip(METRICS, totals, strict=True):
                if count and metric in self.measured:
                    results[f"{prefix}{metric}[{self.label}]"] = total / count
        return results | {"count": table["image"][-1]}
