"""Augmentation of training images on the device: TrivialAugment, mixup and CutMix.

TrivialAugment (Müller and Hutter 2021) applies one random operation of random strength, from the wide range of
strengths, to each image; Equalize is left out. Mixup (Zhang et al. 2018) blends two images, CutMix (Yun et al. 2019)
pastes a rectangle, and the labels are mixed alike. An image is mixed with its neighbour in the global batch (positions
0 and 1, 2 and 3, …). The order of the samples is random, so the neighbour is a random image. If every device has an
even number of images, the pairs do not depend on the number of devices. All shapes are fixed, as CUDA graphs require.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.contracts.data_spec import LUMA
from paceline.core.errors import UserError

TRIVIAL_UNIFORMS = 3
OPERATION, STRENGTH, SIGN = range(TRIVIAL_UNIFORMS)  # the column of random numbers that each choice reads

MAX_SHEAR = 0.99
MAX_SHIFT_PX = 32
MAX_ROTATION = math.radians(135)
MAX_CHANGE = 0.99  # for brightness, contrast, colour and sharpness: the factor is between 0.01 and 1.99
MIN_BITS = 2  # for posterize
GEOMETRIC = ("shear_x", "shear_y", "translate_x", "translate_y", "rotate")


def trivial_augment(images: Tensor, uniforms: Tensor) -> Tensor:
    """Apply one operation to each image in [-1, 1], chosen by the image's own row of random numbers in [0, 1)."""
    uniforms = uniforms.to(images.dtype)
    chosen = (uniforms[:, OPERATION] * NUM_OPERATIONS).floor().long()
    strength = uniforms[:, STRENGTH]
    signed = torch.where(uniforms[:, SIGN] < 0.5, -strength, strength)
    images = _warp(images, chosen, signed)
    for position, operation in enumerate(COLOUR.values(), start=len(GEOMETRIC)):
        is_chosen = (chosen == position)[:, None, None, None]
        images = torch.where(
            is_chosen, operation(images, strength[:, None, None, None], signed[:, None, None, None]), images
        )
    return images


def _warp(images: Tensor, chosen: Tensor, signed: Tensor) -> Tensor:
    """Shear, shift or rotate the images for which one of these operations was chosen."""
    amount = [torch.where(chosen == position, signed, 0) for position in range(len(GEOMETRIC))]
    shear_x, shear_y, shift_x, shift_y, rotation = amount
    height, width = images.shape[2:]
    angle, aspect = rotation * MAX_ROTATION, height / width
    cosine, sine = angle.cos(), angle.sin()
    # grid_sample uses coordinates from -1 to 1 on both axes, so pixels are not square unless the image is.
    x, y = (2 * torch.arange(n, device=images.device, dtype=images.dtype) / n + 1 / n - 1 for n in (width, height))
    x, y = x[None, None, :], y[None, :, None]
    from_x = _at(cosine) * x + _at((shear_x * MAX_SHEAR - sine) * aspect) * y + _at(shift_x * 2 * MAX_SHIFT_PX / width)
    from_y = _at((shear_y * MAX_SHEAR + sine) / aspect) * x + _at(cosine) * y + _at(shift_y * 2 * MAX_SHIFT_PX / height)
    # Computed without affine_grid, whose matrix product would be rounded under autocast.
    grid = torch.stack([from_x, from_y], -1)
    warped = F.grid_sample(images, grid, mode="nearest", padding_mode="zeros", align_corners=False)  # 0 is mid-grey
    return torch.where((chosen < len(GEOMETRIC))[:, None, None, None], warped, images)


def _at(values: Tensor) -> Tensor:
    """Return one number per image in a shape that broadcasts against [n, height, width]."""
    return values[:, None, None]


def _blend(images: Tensor, towards: Tensor, signed: Tensor) -> Tensor:
    """Interpolate between `towards` (factor 0) and the images (factor 1), or extrapolate (factor up to 1.99)."""
    return torch.lerp(towards, images, 1 + signed * MAX_CHANGE).clamp(-1, 1)


def _grey(images: Tensor) -> Tensor:
    if images.shape[1] != 3:
        return images.mean(1, keepdim=True)
    red, green, blue = torch.split(images, 1, dim=1)
    grey: Tensor = LUMA[0] * red + LUMA[1] * green + LUMA[2] * blue
    return grey


def _sharpness(images: Tensor, strength: Tensor, signed: Tensor) -> Tensor:
    # A 3×3 filter of ones with 5 in the middle, divided by 13.
    sums = 9 * F.avg_pool2d(F.pad(images, (1, 1, 1, 1), mode="replicate"), 3, stride=1)
    return _blend(images, (sums + 4 * images) / 13, signed)


def _posterize(images: Tensor, strength: Tensor, signed: Tensor) -> Tensor:
    bits = 8 - (strength * (8 - MIN_BITS + 1)).floor()
    step = 2 ** (8 - bits)
    levels = ((images + 1) * 127.5).round()
    return (levels / step).floor() * step / 127.5 - 1


def _autocontrast(images: Tensor, strength: Tensor, signed: Tensor) -> Tensor:
    low, high = images.amin((2, 3), keepdim=True), images.amax((2, 3), keepdim=True)
    spread = high - low
    return torch.where(spread > 0, (images - low) * 2 / spread.clamp(min=1e-6) - 1, images)


Operation = Callable[[Tensor, Tensor, Tensor], Tensor]
COLOUR: dict[str, Operation] = {
    "brightness": lambda images, _, signed: _blend(images, torch.full_like(images, -1), signed),
    "colour": lambda images, _, signed: _blend(images, _grey(images).expand_as(images), signed),
    "contrast": lambda images, _, signed: _blend(
        images, _grey(images).mean((1, 2, 3), keepdim=True).expand_as(images), signed
    ),
    "sharpness": _sharpness,
    "posterize": _posterize,
    "solarize": lambda images, strength, _: torch.where(images > 1 - 2 * strength, -images, images),
    "autocontrast": _autocontrast,
}
NUM_OPERATIONS = len(GEOMETRIC) + len(COLOUR) + 1  # the last one leaves the image unchanged


MIX_UNIFORMS = 5
RATIO, ROW, COLUMN, METHOD, IS_MIXED = range(MIX_UNIFORMS)  # the column of random numbers that each choice reads
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
