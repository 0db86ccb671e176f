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
from paceline.evaluation.contract import Case
from paceline.evaluation.image_metrics import (
    CLASSES,
    MIDDLE,
    PEAK,
    ImageEvaluator,
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


class Translation(ImageEvaluator):
    """Mean PSNR and SSIM for each panel, and the overlap of the segmentation classes."""

    def __init__(self, case: Case, spec: DataSpec, device: torch.device, settings: RunSettings) -> None:
        self.compared = spec.panels
        super().__init__(case, spec, device, settings)
        check_sizes(case)
        if SEGMENTATION in spec.panels and spec.channels not in (1, 3):
            raise UserError(
                f"panels: a segmentation needs 1 or 3 channels, whose colours are its classes, not {spec.channels}; "
                "leave the panel out, or give it another name"
            )
        # For each class: the number of pixels in both segmentations, in the predicted one, and in the real one.
        self._overlap = torch.zeros(len(CLASSES), 3, dtype=torch.float64, device=device)

    def protocol(self) -> Protocol:
        rounding = describe_rounding(self.pixels)
        return {**rounding, "channels": "all", "segmentation": f"brightest channel above {MIDDLE}"}

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

    def update(self, prediction: dict[str, Tensor], batch: Batch) -> None:
        pairs = self.pairs(prediction, batch)
        for name, (made, real) in pairs.items():
            self.add_images(name, [metric(made, real, self.pixels.span) for metric in (psnr, ssim)])
        self.add_region(pairs)

    def sums(self) -> Tensor:
        return torch.cat([self.table.flatten(), self._overlap.flatten()])

    def results(self, sums: Tensor) -> dict[str, float]:
        quality, overlap = sums.tensor_split([self.table.numel()])
        means = self.means(quality)
        results = {metric: mean_of(values[metric] for values in means.values()) for metric in self.metrics}
        results |= {f"{name}_{metric}": values[metric] for name, values in means.items() for metric in self.metrics}
        return results | overlaps(overlap) | {"count": max(values["count"] for values in means.values())}
