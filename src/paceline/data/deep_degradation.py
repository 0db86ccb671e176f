"""Blur and noise for images that Pillow's filters do not support: 16 bits, floating point, or many channels."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.contracts.data_spec import PixelFormat

LEVELS = 255.0  # the noise strength is on a scale from 0 to 255
REACH_IN_SIGMAS = 3.0  # radius of the Gaussian kernel


def degrade_deep(
    image: NDArray[Any], pixels: PixelFormat, max_sigma: float, noise: float, chance: np.random.Generator
) -> NDArray[Any]:
    """Return an image [h, w, c] with Gaussian blur (sigma drawn from [max_sigma/2, max_sigma] px), then noise."""
    values = image.astype(np.float32)
    if max_sigma:
        values = gaussian_blur(values, max_sigma * (0.5 + 0.5 * chance.random()))
    if noise:
        strength = np.float32(noise * pixels.span / LEVELS)
        values = values + strength * chance.standard_normal(values.shape, dtype=np.float32)
    values = values.round() if pixels.is_integer else values
    return values.clip(pixels.low, pixels.high).astype(pixels.dtype)


def gaussian_blur(image: NDArray[np.float32], sigma: float) -> NDArray[np.float32]:
    """Blur the rows and columns of an image [h, w, c], repeating its border pixels."""
    reach = max(1, math.ceil(REACH_IN_SIGMAS * sigma))
    weights = np.exp(-0.5 * (np.arange(-reach, reach + 1) / sigma) ** 2)
    weights = (weights / weights.sum()).astype(np.float32)
    for axis in (0, 1):
        margins = [(reach, reach) if dimension == axis else (0, 0) for dimension in range(3)]
        padded, length = np.pad(image, margins, mode="edge"), image.shape[axis]
        parts = (padded.take(range(start, start + length), axis) for start in range(len(weights)))
        image = np.sum([weight * part for weight, part in zip(weights, parts, strict=True)], axis=0, dtype=np.float32)
    return image
