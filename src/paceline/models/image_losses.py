"""Losses that compare images in [-1, 1] by frequencies or structure, in float32 or wider."""

from __future__ import annotations

import math
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.core.errors import UserError

SSIM_WINDOW, SSIM_SIGMA = 11, 1.5
SSIM_C1, SSIM_C2 = (0.01 * 2) ** 2, (0.03 * 2) ** 2  # values have a range of 2


def fft_loss(made: Tensor, target: Tensor) -> Tensor:
    """Return the mean absolute difference of the orthonormal 2-D Fourier coefficients, real and imaginary parts."""
    with torch.autocast(made.device.type, enabled=False):
        wide = torch.promote_types(made.dtype, torch.float32)
        coefficients = torch.fft.rfft2((made - target).to(wide), norm="ortho")
        return torch.view_as_real(coefficients).abs().mean()


def ssim_loss(made: Tensor, target: Tensor) -> Tensor:
    """Return 1 - SSIM, averaged over windows, channels and images; see `evaluation.image_metrics` for the metric."""
    height, width = made.shape[-2:]
    if min(height, width) < SSIM_WINDOW:
        raise UserError(
            f"ssim: needs images of at least {SSIM_WINDOW}×{SSIM_WINDOW} pixels, not {width}×{height}; "
            "use a larger --crop, or set ssim=0"
        )
    with torch.autocast(made.device.type, enabled=False):
        wide = torch.promote_types(made.dtype, torch.float32)
        one, other = made.to(wide), target.to(wide)
        parts = torch.cat([one, other, one * one, other * other, one * other])
        mean1, mean2, square1, square2, product = _window_means(parts).chunk(5)
        variances = square1 - mean1.square() + square2 - mean2.square()
        covariance = product - mean1 * mean2
        likeness = (2 * mean1 * mean2 + SSIM_C1) * (2 * covariance + SSIM_C2)
        return 1 - (likeness / ((mean1.square() + mean2.square() + SSIM_C1) * (variances + SSIM_C2))).mean()


def _window_means(images: Tensor) -> Tensor:
    """Return Gaussian-weighted means of all windows inside the image."""
    channels, weights = images.shape[1], _window(images.device, images.dtype)
    for shape in ((1, 1, SSIM_WINDOW, 1), (1, 1, 1, SSIM_WINDOW)):
        images = F.conv2d(images, weights.view(shape).repeat(channels, 1, 1, 1), groups=channels)
    return images


# Cached for the life of the process, because a CUDA graph cannot copy values from the CPU.
@cache
def _window(device: torch.device, dtype: torch.dtype) -> Tensor:
    weights = [math.exp(-((n - SSIM_WINDOW // 2) ** 2) / (2 * SSIM_SIGMA**2)) for n in range(SSIM_WINDOW)]
    return torch.tensor([weight / sum(weights) for weight in weights], dtype=dtype, device=device)
