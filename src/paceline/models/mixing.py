"""Mixup and CutMix: each training image is mixed with another one, and so is its label.

Mixup (Zhang et al. 2018) blends two images; CutMix (Yun et al. 2019) pastes a rectangle. An image is mixed with its
neighbour in the global batch (positions 0 and 1, 2 and 3, …). The order of the samples is random, so the neighbour is a
random image. If every device has an even number of images, the pairs do not depend on the number of devices.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import torch
from torch import Tensor

from paceline.core.errors import UserError

NUM_UNIFORMS = 5
RATIO, ROW, COLUMN, METHOD, IS_MIXED = range(NUM_UNIFORMS)  # the column of random numbers that each choice reads
TABLE_SIZE = 4096  # number of intervals in the table of a Beta distribution's quantiles


def neighbours(tensor: Tensor) -> Tensor:
    """Return the rows of a tensor with each pair of neighbouring rows swapped."""
    if len(tensor) % 2:
        raise UserError(
            f"mixup and cutmix need an even number of images per device and micro-batch, not {len(tensor)}: "
            "change --batch-size"
        )
    pairs: Tensor = tensor.unflatten(0, (-1, 2))
    return pairs.flip(1).flatten(0, 1)


def mix(
    images: Tensor, uniforms: Tensor, mixup: float, cutmix: float, probability: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Mix each image with its neighbour; return the images and the fraction of each image that is its own.

    `mixup` and `cutmix` are the parameters of Beta(α, α) distributions, or 0. If both are set, each image uses one of
    the two methods, with equal probability. `probability` is the fraction of the images that are mixed. Each image uses
    its own row of random numbers in [0, 1).
    """
    uniforms = uniforms.to(images.dtype)
    own = torch.ones_like(images[:, :1])  # for each pixel, the fraction that comes from the image itself
    if mixup:
        own = own * _beta(uniforms[:, RATIO], mixup)[:, None, None, None]
    if cutmix:
        outside = _outside_box(own, uniforms, _beta(uniforms[:, RATIO], cutmix))
        own = torch.where(uniforms[:, METHOD, None, None, None] < 0.5, own, outside) if mixup else outside
    own = torch.where(uniforms[:, IS_MIXED, None, None, None] < probability, own, 1)
    mixed = images * own + neighbours(images) * (1 - own)
    return mixed, own.mean((1, 2, 3))


def _outside_box(like: Tensor, uniforms: Tensor, ratio: Tensor) -> Tensor:
    """Return 1 outside a box with a fraction 1 - ratio of the area, centred anywhere in the image, and 0 inside."""
    height, width = like.shape[2:]
    side = (1 - ratio).sqrt()
    in_rows = _covered(height, uniforms[:, ROW], side)
    in_columns = _covered(width, uniforms[:, COLUMN], side)
    inside = in_rows[:, :, None] & in_columns[:, None, :]
    return (~inside)[:, None].to(like.dtype)


def _covered(length: int, centre: Tensor, side: Tensor) -> Tensor:
    """Return a mask of the positions within an interval of `side` · `length` pixels, which may cross the border."""
    position = torch.arange(length, device=centre.device)
    middle, size = (centre * length).floor()[:, None], (side * length).floor()[:, None]
    start = middle - (size / 2).floor()
    return (position >= start) & (position < start + size)


def _beta(uniform: Tensor, alpha: float) -> Tensor:
    """Map numbers uniform in [0, 1) to numbers that follow the distribution Beta(alpha, alpha)."""
    table = _quantiles(alpha, uniform.device, uniform.dtype)
    place = uniform * TABLE_SIZE
    low = place.floor().long().clamp(max=TABLE_SIZE - 1)
    return torch.lerp(table[low], table[low + 1], place - low)


# Cached for the life of the process, since a captured CUDA graph keeps using the tensor.
@cache
def _quantiles(alpha: float, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return the quantiles of Beta(alpha, alpha) at TABLE_SIZE + 1 evenly spaced probabilities from 0 to 1."""
    alpha = max(alpha, 1e-6)  # below this, almost every quantile is 0 or 1
    # With x = t^(1/α), the density x^(α-1) · (1-x)^(α-1) dx becomes (1-x)^(α-1) dt, which is bounded for x ≤ 1/2.
    power = min(alpha, 1)  # above 1, the density itself is bounded
    t = np.linspace(0, 0.5**power, 64 * TABLE_SIZE)
    x = t ** (1 / power)
    density = x ** (alpha - power) * (1 - x) ** (alpha - 1)
    area = np.concatenate([[0.0], np.cumsum((density[1:] + density[:-1]) / 2)])
    lower = np.interp(np.linspace(0, 0.5, TABLE_SIZE // 2 + 1), 0.5 * area / area[-1], x)
    table = np.concatenate([lower, 1 - lower[-2::-1]])
    return torch.tensor(table, device=device, dtype=dtype)
