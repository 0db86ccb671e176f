"""Metrics of images: PSNR, SSIM, LPIPS, and the overlap of segmentations."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import cast

import torch
from torch import Tensor

from paceline.config.settings import RunSettings
from paceline.contracts.data_spec import EIGHT_BITS, PixelFormat
from paceline.contracts.recipe import Batch, DataSpec
from paceline.core.errors import UserError, describe_error
from paceline.data.source import sizes_of
from paceline.evaluation.contract import Case, Evaluator
from paceline.models.features import has_lpips, load_lpips

MATLAB_LUMA, MATLAB_LUMA_SHIFT = (65.481 / 255, 128.553 / 255, 24.966 / 255), 16.0
PEAK = 255.0
PSNR_OF_IDENTICAL = 100.0  # dB for identical images, instead of infinity
ALL_CHANNELS = "all"  # the protocol of images that are neither grey nor RGB, compared in all channels
WINDOW, SIGMA = 11, 1.5
K1, K2 = 0.01, 0.03


def protocol_label(protocol: str, channels: int) -> str:
    """Return the protocol in the names of metrics: `all` for images that are neither grey nor RGB."""
    return protocol if channels in (1, 3) else ALL_CHANNELS


def check_sizes(case: Case, border: int = 0) -> None:
    """Raise UserError for an image smaller than SSIM's window, before anything is predicted."""
    sides = sizes_of(case.source).min(axis=1)
    left = sides // case.output_scale * case.output_scale - 2 * border
    worst = int(left.argmin())
    if left[worst] < WINDOW:
        raise UserError(
            f"{case.source.name_of(worst)}: a side of {sides[worst]} pixels is too short to compare: SSIM needs "
            f"{WINDOW} pixels, but only {left[worst]} can be used; remove the image from the {case.split} split"
        )


class ImageEvaluator(Evaluator):
    """Compares images with their targets by PSNR and SSIM, as a whole or by region."""

    compared: tuple[str, ...]  # the names of the images that may be compared with a target
    metrics: tuple[str, ...] = ("psnr", "ssim")
    border = 0  # number of pixels at each edge that are ignored

    def __init__(self, case: Case, spec: DataSpec, device: torch.device, settings: RunSettings) -> None:
        super().__init__(case, spec, device, settings)
        self.pixels = case.source.spec.pixel_format
        # For each compared image: the sum of each metric, and the number of images.
        self.table = torch.zeros(len(self.compared), len(self.metrics) + 1, dtype=torch.float64, device=device)

    def pairs(self, prediction: dict[str, Tensor], batch: Batch) -> dict[str, tuple[Tensor, Tensor]]:
        """Return the levels of each predicted image and of its target, in a region."""
        raise NotImplementedError

    def add_region(self, pairs: Mapping[str, tuple[Tensor, Tensor]]) -> None:
        """Add a region to the sums that do not depend on other regions; regions do not overlap."""

    def add_images(self, name: str, values: Sequence[Tensor]) -> None:
        """Add whole images, given the first metrics of each; the others are 0."""
        unknown = len(self.metrics) - len(values)
        rows = [*values, *[torch.zeros_like(values[0])] * unknown, torch.ones_like(values[0])]
        self.table[self.compared.index(name)] += torch.stack(rows).sum(dim=1).to(self.table.device)

    def means(self, sums: Tensor) -> dict[str, dict[str, float]]:
        """Return the mean of each metric and the number of images ("count"), by the names of the compared images."""
        rows = zip(self.compared, sums.view(len(self.compared), -1).tolist(), strict=True)
        measured = {name: row for name, row in rows if row[-1]}
        assert measured, "cannot compute the PSNR of an empty split"
        return {
            name: {metric: total / count for metric, total in zip(self.metrics, totals, strict=True)} | {"count": count}
            for name, (*totals, count) in measured.items()
        }


def to_levels(images: Tensor, pixels: PixelFormat = EIGHT_BITS) -> Tensor:
    """Return images in [-1, 1] as levels from 0 to the peak, in float64, rounded if pixels are whole numbers."""
    levels = (images.detach().double() + 1) * pixels.half
    return (levels.round() if pixels.is_integer else levels).clamp(0, pixels.span)


def describe_rounding(pixels: PixelFormat) -> dict[str, str | float]:
    """Return how images are rounded before they are compared and, unless they are 8-bit, the peak of the metrics."""
    if pixels == EIGHT_BITS:
        return {"rounded": "to 8 bits"}
    return {"rounded": "to 16 bits" if pixels.is_integer else "no", "data_range": pixels.span}


def luma(levels: Tensor, peak: float = PEAK) -> Tensor:
    """Return MATLAB's luma (16…235 for 8 bits) for RGB images; grey images are returned unchanged."""
    if levels.shape[1] == 1:
        return levels
    red, green, blue = levels.unbind(1)
    weighted = MATLAB_LUMA[0] * red + MATLAB_LUMA[1] * green + MATLAB_LUMA[2] * blue
    return (weighted + MATLAB_LUMA_SHIFT * (peak / PEAK))[:, None]


def psnr(made: Tensor, target: Tensor, peak: float = PEAK) -> Tensor:
    """Return the peak signal-to-noise ratio of each image, in dB."""
    return decibels((made - target).square().mean((1, 2, 3)), peak)


def decibels(squares: Tensor, peak: float) -> Tensor:
    """Return the peak signal-to-noise ratio in dB for mean squared differences."""
    return torch.where(squares > 0, 10 * (peak**2 / squares).log10(), PSNR_OF_IDENTICAL)


def ssim(made: Tensor, target: Tensor, peak: float = PEAK) -> Tensor:
    """Return the structural similarity of each image, averaged over its channels."""
    height, width = made.shape[-2:]
    if min(height, width) < WINDOW:
        raise UserError(
            f"images of {width}×{height} pixels are too small to compare: SSIM needs at least {WINDOW}×{WINDOW}"
        )
    mean1, mean2 = blurred(made), blurred(target)
    variance1, variance2 = blurred(made * made) - mean1 * mean1, blurred(target * target) - mean2 * mean2
    covariance = blurred(made * target) - mean1 * mean2
    c1, c2 = (K1 * peak) ** 2, (K2 * peak) ** 2
    likeness = (2 * mean1 * mean2 + c1) * (2 * covariance + c2)
    return (likeness / ((mean1 * mean1 + mean2 * mean2 + c1) * (variance1 + variance2 + c2))).mean((1, 2, 3))


def blurred(images: Tensor) -> Tensor:
    """Return Gaussian-weighted means for all windows that lie inside the image.

    They are computed as shifted sums, since convolutions in float64 are slow.
    """
    offsets = [number - WINDOW // 2 for number in range(WINDOW)]
    weights = [math.exp(-(offset**2) / (2 * SIGMA**2)) for offset in offsets]
    for dim in (-2, -1):
        length = images.shape[dim] - WINDOW + 1
        total = images.narrow(dim, 0, length) * (weights[0] / sum(weights))
        for start, weight in enumerate(weights[1:], start=1):
            total = total.add_(images.narrow(dim, start, length), alpha=weight / sum(weights))
        images = total
    return images


CLASSES = ("bright", "red", "green", "blue")
MIDDLE = 127.5  # middle of the levels 0…255
ALIKE = 64  # a pixel whose channels differ by fewer levels than this is grey


def pixel_counts(made: Tensor, real: Tensor) -> Tensor:
    """Return pixel counts [class, 3]: in both segmentations, in the first one, and in the second one."""
    one, other = members(made), members(real)
    pixels = torch.stack([one & other, one, other], dim=1)  # shape [class, 3, ...]
    return pixels.flatten(2).sum(dim=2, dtype=torch.float64)


def members(levels: Tensor) -> Tensor:
    """Return a mask of the pixels in each class, as [class, n, h, w]."""
    brightest, colour = levels.max(dim=1)
    above = brightest > MIDDLE
    grey = brightest - levels.min(dim=1).values < ALIKE
    return torch.stack([above & grey, *(above & ~grey & (colour == number) for number in range(3))])


def overlaps(sums: Tensor) -> dict[str, float]:
    """Return IoU and Dice for the classes that occur in the real segmentations, and their means."""
    found = {
        name: (both / (made + real - both), 2 * both / (made + real))
        for name, (both, made, real) in zip(CLASSES, sums.view(-1, 3).tolist(), strict=True)
        if real
    }
    if not found:
        return {}
    results = {"iou": mean_of(iou for iou, _ in found.values()), "dice": mean_of(dice for _, dice in found.values())}
    if len(found) > 1:
        for name, (iou, dice) in found.items():
            results |= {f"iou_{name}": iou, f"dice_{name}": dice}
    return results


def mean_of(values: Iterable[float]) -> float:
    listed = list(values)
    return sum(listed) / len(listed)


Distance = Callable[[Tensor, Tensor], Tensor]


def perceptual_distance(device: torch.device) -> tuple[Distance | None, tuple[str, ...]]:
    """Return a function that computes LPIPS for images in 0…255 (None if unavailable), and a note if loading failed."""
    if not has_lpips():
        return None, ()
    try:
        network = load_lpips().to(device)
    except Exception as error:
        return None, (f"LPIPS is not measured, because its network cannot be loaded: {describe_error(error)}",)

    def distance(made: Tensor, target: Tensor) -> Tensor:
        one, other = ((levels.float() / 127.5 - 1).expand(-1, 3, -1, -1) for levels in (made, target))
        with torch.autocast(made.device.type, enabled=False):
            return cast(Tensor, network(one, other)).flatten().double()

    return distance, ()
