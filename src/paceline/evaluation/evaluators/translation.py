"""Predicted panels compared with the real ones: PSNR and SSIM for each, IoU and Dice for the segmentation.

Images are rounded to 8 or 16 bits, or not at all for floating-point pixels. The data range is 255, 65535 or the length
of the declared range. PSNR and SSIM are computed over all channels and averaged over images. A pixel of a
segmentation is background if its brightest channel is below the middle. Otherwise, its class is that channel (red,
green, blue), or `bright` if its channels are nearly equal. IoU and Dice are computed over all pixels in the split for
each class that occurs in the real segmentations, and then averaged over these classes.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from paceline.config.settings import RunSettings
from paceline.contracts.recipe import Batch, DataSpec
from paceline.core.errors import UserError
from paceline.evaluation.contract import Case, Evaluator, MeasuredByRegion, Quality
from paceline.evaluation.image_metrics import (
    CLASSES,
    MIDDLE,
    PEAK,
    check_sizes,
    describe_rounding,
    mean_of,
    overlaps,
    pixel_counts,
    psnr,
    ssim,
    to_levels,
)
from paceline.evaluation.protocol import Protocol

SEGMENTATION = "segmentation"


class Translation(Evaluator, MeasuredByRegion):
    """Mean PSNR and SSIM for each panel, and the overlap of the segmentation classes."""

    def __init__(self, case: Case, spec: DataSpec, device: torch.device, settings: RunSettings) -> None:
        super().__init__(case, spec, device, settings)
        check_sizes(case)
        self.pixels, self.border = case.source.spec.pixel_format, 0
        if SEGMENTATION in spec.panels and spec.channels not in (1, 3):
            raise UserError(
                f"panels: a segmentation needs 1 or 3 channels, whose colours are its classes, not {spec.channels}; "
                "leave the panel out, or give it another name"
            )
        # For each panel: the sums of PSNR and SSIM, and the number of images.
        self._quality = torch.zeros(len(spec.panels), 3, dtype=torch.float64, device=device)
        # For each class: the number of pixels in both segmentations, in the predicted one, and in the real one.
        self._overlap = torch.zeros(len(CLASSES), 3, dtype=torch.float64, device=device)

    def protocol(self) -> Protocol:
        rounding = describe_rounding(self.pixels)
        return {**rounding, "channels": "all", "segmentation": f"brightest channel above {MIDDLE}"}

    @property
    def compared(self) -> tuple[str, ...]:
        return self.spec.panels

    def pairs(self, prediction: dict[str, Tensor], batch: Batch) -> dict[str, tuple[Tensor, Tensor]]:
        return {
            name: (to_levels(prediction[name], self.pixels), to_levels(batch[name], self.pixels))
            for name in self.spec.panels
            if name in prediction
        }

    def add_region(self, pairs: Mapping[str, tuple[Tensor, Tensor]]) -> None:
        if SEGMENTATION in pairs:
            factor = PEAK / self.pixels.span  # classes are defined on a scale from 0 to 255
            made, real = pairs[SEGMENTATION]
            self._overlap += pixel_counts(made * factor, real * factor)

    def add_image(self, qualities: Mapping[str, Quality]) -> None:
        for name, quality in qualities.items():
            values = torch.tensor([*quality, 1.0], dtype=torch.float64)
            self._quality[self.spec.panels.index(name)] += values.to(self._quality.device)

    def update(self, prediction: dict[str, Tensor], batch: Batch) -> None:
        pairs = self.pairs(prediction, batch)
        for name, (made, real) in pairs.items():
            values = [metric(made, real, self.pixels.span) for metric in (psnr, ssim)]
            number = self.spec.panels.index(name)
            self._quality[number] += torch.stack([*values, torch.ones_like(values[0])]).sum(dim=1)
        self.add_region(pairs)

    def sums(self) -> Tensor:
        return torch.cat([self._quality.flatten(), self._overlap.flatten()])

    def results(self, sums: Tensor) -> dict[str, float]:
        quality, overlap = sums.tensor_split([self._quality.numel()])
        measured = {
            name: (row[0] / row[2], row[1] / row[2], row[2])
            for name, row in zip(self.spec.panels, quality.view(-1, 3).tolist(), strict=True)
            if row[2]
        }
        assert measured, "cannot compute the PSNR of an empty split"
        results = {
            "psnr": mean_of(row[0] for row in measured.values()),
            "ssim": mean_of(r[1] for r in measured.values()),
        }
        for name, (panel_psnr, panel_ssim, _) in measured.items():
            results |= {f"{name}_psnr": panel_psnr, f"{name}_ssim": panel_ssim}
        return results | overlaps(overlap) | {"count": max(row[2] for row in measured.values())}
