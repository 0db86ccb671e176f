"""Restored images compared with the originals: PSNR, SSIM, LPIPS if its package is installed, and NIQE on request.

Both images are first rounded to 8 bits, as in image files. Protocol `y` compares luma (16…235, as MATLAB's rgb2ycbcr
computes it, not rounded again); `rgb` compares all channels. When upscaling, both ignore a border as wide as the scale.
Each metric is computed per image and then averaged. PSNR has a peak of 255. SSIM has a Gaussian window of 11 pixels
with σ = 1.5, K = 0.01 and 0.03, and uses only pixels whose window lies inside the image. If a recipe also predicts a
baseline (bicubic, the input), the baseline is measured in the same way.
"""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.config.settings import RunSettings
from paceline.contracts.recipe import Batch, DataSpec
from paceline.data.source import sizes_of
from paceline.evaluation.contract import Case, Evaluator
from paceline.evaluation.image_metrics import SIGMA, WINDOW, check_sizes, luma, psnr, ssim, to_levels
from paceline.evaluation.niqe import PROTOCOL, check_niqe_size, niqe
from paceline.evaluation.perceptual import perceptual_distance
from paceline.evaluation.protocol import Protocol

MEASURED = ("image", "bicubic", "input")  # fields of a prediction that are compared with the target
METRICS = ("psnr", "ssim", "lpips", "niqe")


class Restoration(Evaluator):
    """Mean PSNR, SSIM, LPIPS and NIQE for restored images and baselines."""

    def __init__(self, case: Case, spec: DataSpec, device: torch.device, settings: RunSettings) -> None:
        super().__init__(case, spec, device, settings)
        self.label = settings.protocol
        self.border = case.output_scale if case.output_scale > 1 else 0
        check_sizes(case, self.border)
        self.distance, self.notes = perceptual_distance(device)
        self.measured = {"psnr", "ssim"} | ({"lpips"} if self.distance else set())
        if settings.niqe:
            self.measured.add("niqe")
            for index, (height, width) in enumerate(sizes_of(case.source).tolist()):
                check_niqe_size(height, width, case.source.name_of(index))
        self._sums = torch.zeros(len(MEASURED), len(METRICS) + 1, dtype=torch.float64, device=device)

    def protocol(self) -> Protocol:
        return {
            "protocol": self.settings.protocol,
            "border": self.border,
            "rounded": "to 8 bits",
            "ssim": f"gaussian window {WINDOW}, sigma {SIGMA}",
            "lpips": "alex" if self.distance else "not measured",
            **({"niqe": PROTOCOL} if "niqe" in self.measured else {}),
        }

    def update(self, prediction: dict[str, Tensor], batch: Batch) -> None:
        target = to_levels(prediction["target"])
        for number, name in enumerate(MEASURED):
            if name not in prediction:
                continue
            made = to_levels(prediction[name])
            assert made.shape == target.shape, f"shape of {name}: {made.shape}; shape of its target: {target.shape}"
            one, other = (self._compared(images) for images in (made, target))
            values = [psnr(one, other), ssim(one, other)]
            values.append(self.distance(made, target) if self.distance else torch.zeros_like(values[0]))
            values.append(niqe(made) if "niqe" in self.measured else torch.zeros_like(values[0]))
            values.append(torch.ones_like(values[0]))
            self._sums[number] += torch.stack(values).sum(dim=1)

    def _compared(self, levels: Tensor) -> Tensor:
        """Return the region and the channels that the protocol compares."""
        border, (height, width) = self.border, levels.shape[-2:]
        cut = levels[..., border : height - border, border : width - border]
        return luma(cut) if self.settings.protocol == "y" else cut

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
