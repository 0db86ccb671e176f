"""TrivialAugment: one random operation of random strength for each image, on the device.

Müller and Hutter, TrivialAugment: Tuning-free Yet State-of-the-Art Data Augmentation (2021), with its wide range of
strengths. Equalize is left out. All operations have fixed shapes, so they can be captured in a CUDA graph.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.contracts.data_spec import LUMA

NUM_UNIFORMS = 3
OPERATION, STRENGTH, SIGN = range(NUM_UNIFORMS)  # the column of random numbers that each choice reads

MAX_SHEAR = 0.99
MAX_SHIFT_PX = 32
MAX_ROTATION = math.radians(135)
MAX_CHANGE = 0.99  # for brightness, contrast, colour and sharpness: the factor is between 0.01 and 1.99
MIN_BITS = 2  # for posterize
GEOMETRIC = ("shear_x", "shear_y", "translate_x", "translate_y", "rotate")


def augment(images: Tensor, uniforms: Tensor) -> Tensor:
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


def _brightness(images: Tensor, strength: Tensor, signed: Tensor) -> Tensor:
    return _blend(images, torch.full_like(images, -1), signed)


def _colour(images: Tensor, strength: Tensor, signed: Tensor) -> Tensor:
    return _blend(images, _grey(images).expand_as(images), signed)


def _contrast(images: Tensor, strength: Tensor, signed: Tensor) -> Tensor:
    return _blend(images, _grey(images).mean((1, 2, 3), keepdim=True).expand_as(images), signed)


def _sharpness(images: Tensor, strength: Tensor, signed: Tensor) -> Tensor:
    # A 3×3 filter of ones with 5 in the middle, divided by 13.
    sums = 9 * F.avg_pool2d(F.pad(images, (1, 1, 1, 1), mode="replicate"), 3, stride=1)
    return _blend(images, (sums + 4 * images) / 13, signed)


def _posterize(images: Tensor, strength: Tensor, signed: Tensor) -> Tensor:
    bits = 8 - (strength * (8 - MIN_BITS + 1)).floor()
    step = 2 ** (8 - bits)
    levels = ((images + 1) * 127.5).round()
    return (levels / step).floor() * step / 127.5 - 1


def _solarize(images: Tensor, strength: Tensor, signed: Tensor) -> Tensor:
    return torch.where(images > 1 - 2 * strength, -images, images)


def _autocontrast(images: Tensor, strength: Tensor, signed: Tensor) -> Tensor:
    low, high = images.amin((2, 3), keepdim=True), images.amax((2, 3), keepdim=True)
    spread = high - low
    return torch.where(spread > 0, (images - low) * 2 / spread.clamp(min=1e-6) - 1, images)


Operation = Callable[[Tensor, Tensor, Tensor], Tensor]
COLOUR: dict[str, Operation] = {
    "brightness": _brightness,
    "colour": _colour,
    "contrast": _contrast,
    "sharpness": _sharpness,
    "posterize": _posterize,
    "solarize": _solarize,
    "autocontrast": _autocontrast,
}
NUM_OPERATIONS = len(GEOMETRIC) + len(COLOUR) + 1  # the last one leaves the image unchanged
