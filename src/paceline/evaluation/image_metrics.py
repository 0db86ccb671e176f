"""PSNR and SSIM for images in 0…255, in float64; used by evaluators and by `apply --downsample`."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from paceline.core.errors import UserError
from paceline.data.source import sizes_of
from paceline.evaluation.contract import Case

LUMA, LUMA_SHIFT = (65.481 / 255, 128.553 / 255, 24.966 / 255), 16.0
PEAK = 255.0
PSNR_OF_IDENTICAL = 100.0  # dB for identical images, instead of infinity
WINDOW, SIGMA = 11, 1.5
C1, C2 = (0.01 * PEAK) ** 2, (0.03 * PEAK) ** 2


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


def to_levels(images: Tensor) -> Tensor:
    """Round images in [-1, 1] to 8-bit levels, 0…255, in float64."""
    return ((images.detach().double() + 1) * 127.5).round().clamp(0, 255)


def luma(levels: Tensor) -> Tensor:
    """Return MATLAB's luma (16…235) for RGB images in 0…255; grey images are returned unchanged."""
    if levels.shape[1] == 1:
        return levels
    red, green, blue = levels.unbind(1)
    return (LUMA[0] * red + LUMA[1] * green + LUMA[2] * blue + LUMA_SHIFT)[:, None]


def psnr(made: Tensor, target: Tensor) -> Tensor:
    """Return the peak signal-to-noise ratio of each image, in dB."""
    squares = (made - target).square().mean((1, 2, 3))
    return torch.where(squares > 0, 10 * (PEAK**2 / squares).log10(), PSNR_OF_IDENTICAL)


def ssim(made: Tensor, target: Tensor) -> Tensor:
    """Return the structural similarity of each image, averaged over its channels."""
    height, width = made.shape[-2:]
    if min(height, width) < WINDOW:
        raise UserError(
            f"images of {width}×{height} pixels are too small to compare: SSIM needs at least {WINDOW}×{WINDOW}"
        )
    mean1, mean2 = blurred(made), blurred(target)
    variance1, variance2 = blurred(made * made) - mean1 * mean1, blurred(target * target) - mean2 * mean2
    covariance = blurred(made * target) - mean1 * mean2
    likeness = (2 * mean1 * mean2 + C1) * (2 * covariance + C2)
    return (likeness / ((mean1 * mean1 + mean2 * mean2 + C1) * (variance1 + variance2 + C2))).mean((1, 2, 3))


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
