"""PSNR and SSIM in float64, for pixels of any format; used by evaluators, `measure` and `apply --downsample`.

Images have levels from 0 to a peak, which is 255 for 8 bits, 65535 for 16 bits, or the length of the declared range.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from paceline.contracts.pixel_format import EIGHT_BITS, PixelFormat
from paceline.core.errors import UserError
from paceline.data.source import sizes_of
from paceline.evaluation.contract import Case

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
    squares = (made - target).square().mean((1, 2, 3))
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
