"""Restored pictures against the real ones: PSNR, SSIM, and LPIPS where its package is installed.

Both pictures are rounded to eight bits first, as files would hold them. Then the protocol decides: `y` compares luma,
16…235, as MATLAB's rgb2ycbcr computes it (not rounded again), without a border as wide as the enlargement; `rgb`
compares all channels, without that border too. A number is the mean over pictures of the value of each. PSNR's peak
is 255; SSIM has a Gaussian window of 11 with σ 1.5, K 0.01 and 0.03, and counts the pixels whose window lies in the
picture. Where a recipe also predicts what it is held against (bicubic, the input), that is measured in the same way.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from paceline.data.source import sizes_of
from paceline.errors import UserError
from paceline.evaluation._judge import Case, Judge
from paceline.recipe import Batch, Facts
from paceline.settings import RunSettings

MEASURED = ("image", "bicubic", "input")  # fields of a prediction
METRICS = ("psnr", "ssim", "lpips")
LUMA, LUMA_SHIFT = (65.481 / 255, 128.553 / 255, 24.966 / 255), 16.0
PEAK = 255.0
PSNR_OF_EQUALS = 100.0  # dB, instead of infinity
WINDOW, SIGMA = 11, 1.5
C1, C2 = (0.01 * PEAK) ** 2, (0.03 * PEAK) ** 2

Distance = Callable[[Tensor, Tensor], Tensor]


class Restoration(Judge):
    """Mean PSNR, SSIM and LPIPS of what was restored and of what it is held against."""

    def __init__(self, facts: Facts, device: torch.device, settings: RunSettings) -> None:
        super().__init__(facts, device, settings)
        self.label = settings.protocol
        self._sums = torch.zeros(len(MEASURED), len(METRICS) + 1, dtype=torch.float64, device=device)

    def begin(self, case: Case) -> None:
        self.border = case.enlarges if case.enlarges > 1 else 0
        refuse_small(case, self.border)
        self.distance, self.notes = _perceptual_distance(self.device)

    def protocol(self) -> dict[str, Any]:
        return {
            "protocol": self.settings.protocol,
            "border": self.border,
            "rounded": "to 8 bits",
            "ssim": f"gaussian window {WINDOW}, sigma {SIGMA}",
            "lpips": "alex" if self.distance else "not measured",
        }

    def update(self, prediction: dict[str, Tensor], batch: Batch) -> None:
        target = in_levels(prediction["target"])
        for number, name in enumerate(MEASURED):
            if name not in prediction:
                continue
            made = in_levels(prediction[name])
            assert made.shape == target.shape, f"{name} is {tuple(made.shape)}, its target {tuple(target.shape)}"
            one, other = (self._compared(pictures) for pictures in (made, target))
            values = [psnr(one, other), ssim(one, other)]
            values.append(self.distance(made, target) if self.distance else torch.zeros_like(values[0]))
            values.append(torch.ones_like(values[0]))
            self._sums[number] += torch.stack(values).sum(dim=1)

    def _compared(self, levels: Tensor) -> Tensor:
        """The part and the channels that the protocol compares."""
        border, (height, width) = self.border, levels.shape[-2:]
        cut = levels[..., border : height - border, border : width - border]
        return luma(cut) if self.settings.protocol == "y" else cut

    def sums(self) -> Tensor:
        return self._sums.flatten().clone()

    def results(self, sums: Tensor) -> dict[str, float]:
        table = dict(zip(MEASURED, sums.view(len(MEASURED), -1).tolist(), strict=True))
        assert table["image"][-1] > 0, "an empty split has no PSNR"
        results = {}
        for name, (*totals, count) in table.items():
            prefix = "" if name == "image" else f"{name}_"
            for metric, total in zip(METRICS, totals, strict=True):
                if count and (metric != "lpips" or self.distance):
                    results[f"{prefix}{metric}[{self.label}]"] = total / count
        return results | {"count": table["image"][-1]}


def refuse_small(case: Case, border: int = 0) -> None:
    """Refuses a picture of which too little is left to compare, by its name and before anything is predicted."""
    sides = sizes_of(case.source).min(axis=1)
    left = sides // case.enlarges * case.enlarges - 2 * border
    worst = int(left.argmin())
    if left[worst] < WINDOW:
        raise UserError(
            f"{case.source.name_of(worst)}: a side of {sides[worst]} pixels is too short to compare: SSIM's window "
            f"has {WINDOW}, and {left[worst]} are left; take the picture out of the {case.split} split"
        )


def in_levels(pictures: Tensor) -> Tensor:
    """Pictures in -1…1 as the numbers that eight bits hold, 0…255, in float64."""
    return ((pictures.detach().double() + 1) * 127.5).round().clamp(0, 255)


def luma(levels: Tensor) -> Tensor:
    """MATLAB's luma of RGB in 0…255, from 16 to 235; a grey picture is its own."""
    if levels.shape[1] == 1:
        return levels
    red, green, blue = levels.unbind(1)
    return (LUMA[0] * red + LUMA[1] * green + LUMA[2] * blue + LUMA_SHIFT)[:, None]


def psnr(made: Tensor, target: Tensor) -> Tensor:
    """The peak signal-to-noise ratio of each picture, in dB."""
    squares = (made - target).square().mean((1, 2, 3))
    return torch.where(squares > 0, 10 * (PEAK**2 / squares).log10(), PSNR_OF_EQUALS)


def ssim(made: Tensor, target: Tensor) -> Tensor:
    """The structural similarity of each picture, over all of its channels."""
    height, width = made.shape[-2:]
    if min(height, width) < WINDOW:
        raise UserError(f"pictures of {width}×{height} pixels are too small to compare: SSIM's window is {WINDOW}")
    mean1, mean2 = blurred(made), blurred(target)
    variance1, variance2 = blurred(made * made) - mean1 * mean1, blurred(target * target) - mean2 * mean2
    covariance = blurred(made * target) - mean1 * mean2
    likeness = (2 * mean1 * mean2 + C1) * (2 * covariance + C2)
    return (likeness / ((mean1 * mean1 + mean2 * mean2 + C1) * (variance1 + variance2 + C2))).mean((1, 2, 3))


def blurred(pictures: Tensor) -> Tensor:
    """Means under the window, where it lies in the picture; shifted sums, since float64 convolutions are slow."""
    offsets = [number - WINDOW // 2 for number in range(WINDOW)]
    weights = [math.exp(-(offset**2) / (2 * SIGMA**2)) for offset in offsets]
    for dim in (-2, -1):
        length = pictures.shape[dim] - WINDOW + 1
        total = pictures.narrow(dim, 0, length) * (weights[0] / sum(weights))
        for start, weight in enumerate(weights[1:], start=1):
            total = total.add_(pictures.narrow(dim, start, length), alpha=weight / sum(weights))
        pictures = total
    return pictures


def _perceptual_distance(device: torch.device) -> tuple[Distance | None, tuple[str, ...]]:
    """LPIPS of pictures in 0…255, where it is installed and has its weights; else why not."""
    if importlib.util.find_spec("lpips") is None:
        return None, ()
    try:
        network = _lpips_network().to(device)
    except Exception as error:
        return None, (f"LPIPS is not measured: {str(error).splitlines()[0]}",)

    def distance(made: Tensor, target: Tensor) -> Tensor:
        one, other = ((levels.float() / 127.5 - 1).expand(-1, 3, -1, -1) for levels in (made, target))
        with torch.autocast(made.device.type, enabled=False):
            return network(one, other).flatten().double()

    return distance, ()


@lru_cache(maxsize=1)
def _lpips_network() -> torch.nn.Module:
    import lpips

    return lpips.LPIPS(net="alex", verbose=False).eval().requires_grad_(False)
