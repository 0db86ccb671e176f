"""Augmentation that keeps a discriminator from memorising a small training set: DiffAugment and ADA.

Zhao et al., Differentiable Augmentation for Data-Efficient GAN Training (2020), and Karras et al., Training Generative
Adversarial Networks with Limited Data (2020), whose strength is adjustable. Real and fake images get the same kinds of
augmentation. The caller passes the random numbers. All operations are differentiable and deterministic.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

LARGEST_SHIFT = 1 / 8  # of a shift by whole pixels, as a fraction of the image side
CUTOUT_SIDE = 1 / 2  # of the area that is replaced by grey, as a fraction of the image side

DIFF_KINDS = ("color", "translation", "cutout")
DIFF_UNIFORMS = 7
# For each augmentation, the column that holds its random number.
BRIGHTNESS, SATURATION, CONTRAST, SHIFT_ROW, SHIFT_COLUMN, CUTOUT_ROW, CUTOUT_COLUMN = range(DIFF_UNIFORMS)


def diff_augment(images: Tensor, uniforms: Tensor, kinds: tuple[str, ...]) -> Tensor:
    """Augment each image with its own row of random numbers in [0, 1) [n, DIFF_UNIFORMS]; see Zhao et al."""
    if "color" in kinds:
        images = _change_color(images, uniforms)
    if "translation" in kinds:
        images = _translate(images, uniforms)
    if "cutout" in kinds:
        images = _cut_out_rectangle(images, uniforms)
    return images


def _change_color(images: Tensor, uniforms: Tensor) -> Tensor:
    def row(name: int) -> Tensor:
        return uniforms[:, name, None, None, None]

    images = images + (row(BRIGHTNESS) - 0.5)
    grey = images.mean(1, keepdim=True)
    images = (images - grey) * (2 * row(SATURATION)) + grey
    mean = images.mean((1, 2, 3), keepdim=True)
    return (images - mean) * (row(CONTRAST) + 0.5) + mean


def _translate(images: Tensor, uniforms: Tensor) -> Tensor:
    """Shift each image by whole pixels; uncovered pixels become 0, which is mid-grey."""
    height, width = images.shape[2:]
    row, row_inside = _shifted(height, uniforms[:, SHIFT_ROW])
    column, column_inside = _shifted(width, uniforms[:, SHIFT_COLUMN])
    sample = torch.arange(len(images), device=images.device)[:, None, None]
    moved = images.permute(0, 2, 3, 1)[sample, row[:, :, None], column[:, None, :]]
    is_inside = (row_inside[:, :, None] & column_inside[:, None, :])[..., None]
    return torch.where(is_inside, moved, 0).permute(0, 3, 1, 2)


def _shifted(side: int, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """Return the source position for each output position, and whether it is inside the image."""
    largest = int(side * LARGEST_SHIFT + 0.5)
    shift = _pick(uniform, 2 * largest + 1) - largest
    position = torch.arange(side, device=uniform.device) + shift[:, None]
    return position.clamp(0, side - 1), (position >= 0) & (position < side)


def _cut_out_rectangle(images: Tensor, uniforms: Tensor) -> Tensor:
    height, width = images.shape[2:]
    in_rows = _covered(height, uniforms[:, CUTOUT_ROW])
    in_columns = _covered(width, uniforms[:, CUTOUT_COLUMN])
    return torch.where((in_rows[:, :, None] & in_columns[:, None, :])[:, None], 0, images)


def _covered(side: int, uniform: Tensor) -> Tensor:
    """Return a mask of the positions covered by a randomly centred interval, which may cross the border."""
    length = int(side * CUTOUT_SIDE + 0.5)
    start = _pick(uniform, side + 1 - length % 2)[:, None] - length // 2
    position = torch.arange(side, device=uniform.device)
    return (position >= start) & (position < start + length)


def _pick(uniform: Tensor, count: int) -> Tensor:
    """Map a number in [0, 1) to an integer below `count`."""
    return (uniform * count).to(torch.int64)


ADA_KINDS = ("blit", "geometry", "color", "cutout")
TRANSFORMS = (
    *("flip", "rot90", "shift"),
    *("scale", "rotate", "stretch", "move"),
    *("brightness", "contrast", "luma_flip", "hue", "saturation"),
    "cutout",
)
NUMBERS_EACH = 3  # the first decides whether the transform is applied; the others are its parameters
ADA_UNIFORMS = NUMBERS_EACH * len(TRANSFORMS)
MAX_STRENGTH = 0.8  # if transforms were applied more often, generated images would look augmented

SCALE_DEVIATION = 0.2  # standard deviation of the base-2 logarithm of the scale
MOVE_DEVIATION = 1 / 8  # standard deviation of a shift by fractions of a pixel, as a fraction of the image side
BRIGHTNESS_DEVIATION, CONTRAST_DEVIATION, SATURATION_DEVIATION = 0.2, 0.5, 1.0  # the last two of the logarithm, base 2


def adaptive_augment(images: Tensor, uniforms: Tensor, strength: Tensor, kinds: tuple[str, ...]) -> Tensor:
    """Augment each image, with rows of random numbers in [0, 1) [n, ADA_UNIFORMS]; see Karras et al.

    Each transform is applied to each image with probability `strength` [n]; with 0, the images are returned unchanged.
    Uncovered pixels are filled by reflection.
    """
    numbers = _Numbers(uniforms, strength)
    side = images.shape[-1]
    place = _identity(strength)
    if "blit" in kinds:
        place = _blit(numbers, side, place)
    if "geometry" in kinds:
        place = _geometry(numbers, side, place)
    if "blit" in kinds or "geometry" in kinds:
        images = _resample(images, place)
    if "color" in kinds:
        images = _recolor(images, numbers)
    return _cut_out_square(images, numbers) if "cutout" in kinds else images


class _Numbers(NamedTuple):
    """The random numbers of a batch, by transform."""

    uniforms: Tensor
    strength: Tensor

    def chosen(self, transform: str, value: Tensor, unchanged: float) -> Tensor:
        """Return a parameter for each image: the value if the transform is applied, otherwise `unchanged`."""
        return torch.where(self.uniform(transform, 0) < self.strength, value, unchanged)

    def uniform(self, transform: str, number: int = 1) -> Tensor:
        return self.uniforms[:, NUMBERS_EACH * TRANSFORMS.index(transform) + number]

    def normal(self, transform: str, number: int = 1) -> Tensor:
        return torch.erfinv((2 * self.uniform(transform, number) - 1).clamp(-0.999999, 0.999999)) * math.sqrt(2)


class _Map(NamedTuple):
    """For each image, the map from a position in the result to a position in the image, relative to its centre.

    x' = xx · x + xy · y + x0, and y' = yx · x + yy · y + y0, in pixels.
    """

    xx: Tensor
    xy: Tensor
    yx: Tensor
    yy: Tensor
    x0: Tensor
    y0: Tensor

    def after(self, xx: Tensor, xy: Tensor, yx: Tensor, yy: Tensor) -> _Map:
        """Return the map that first applies a linear map to the position, then this one."""
        return _Map(
            self.xx * xx + self.xy * yx,
            self.xx * xy + self.xy * yy,
            self.yx * xx + self.yy * yx,
            self.yx * xy + self.yy * yy,
            self.x0,
            self.y0,
        )

    def shifted(self, x: Tensor, y: Tensor) -> _Map:
        """Return the map that first shifts the position."""
        return self._replace(x0=self.x0 + self.xx * x + self.xy * y, y0=self.y0 + self.yx * x + self.yy * y)


def _identity(like: Tensor) -> _Map:
    one, zero = torch.ones_like(like), torch.zeros_like(like)
    return _Map(one, zero, zero, one, zero, zero)


def _blit(numbers: _Numbers, side: int, place: _Map) -> _Map:
    """Flip, rotate by a multiple of 90°, and shift by whole pixels."""
    zero = torch.zeros_like(numbers.strength)
    flip = numbers.chosen("flip", 1 - 2 * (numbers.uniform("flip") * 2).floor(), 1.0)
    place = place.after(flip, zero, zero, zero + 1)
    quarters = numbers.chosen("rot90", (numbers.uniform("rot90") * 4).floor(), 0.0)
    cosine = torch.where(quarters == 0, 1.0, torch.where(quarters == 2, -1.0, zero))
    sine = torch.where(quarters == 1, 1.0, torch.where(quarters == 3, -1.0, zero))
    place = place.after(cosine, -sine, sine, cosine)
    largest = int(side * LARGEST_SHIFT)
    x, y = (
        numbers.chosen("shift", (numbers.uniform("shift", number) * (2 * largest + 1)).floor() - largest, 0.0)
        for number in (1, 2)
    )
    return place.shifted(x, y)


def _geometry(numbers: _Numbers, side: int, place: _Map) -> _Map:
    """Scale, rotate by any angle, stretch along one axis, and shift by fractions of a pixel."""
    zero = torch.zeros_like(numbers.strength)
    scale = numbers.chosen("scale", torch.exp2(SCALE_DEVIATION * numbers.normal("scale")), 1.0)
    place = place.after(scale, zero, zero, scale)
    angle = numbers.chosen("rotate", (2 * numbers.uniform("rotate") - 1) * math.pi, 0.0)
    cosine, sine = angle.cos(), angle.sin()
    place = place.after(cosine, -sine, sine, cosine)
    stretch = numbers.chosen("stretch", torch.exp2(SCALE_DEVIATION * numbers.normal("stretch")), 1.0)
    place = place.after(stretch, zero, zero, 1 / stretch)
    x, y = (numbers.chosen("move", side * MOVE_DEVIATION * numbers.normal("move", number), 0.0) for number in (1, 2))
    return place.shifted(x, y)


def _resample(images: Tensor, place: _Map) -> Tensor:
    """Sample each image bilinearly at the positions that `place` maps the pixels to."""
    count, _, height, width = images.shape
    columns = torch.arange(width, device=images.device, dtype=images.dtype) - (width - 1) / 2
    rows = torch.arange(height, device=images.device, dtype=images.dtype)[:, None] - (height - 1) / 2
    xx, xy, yx, yy, x0, y0 = (part[:, None, None] for part in place)
    x = xx * columns + xy * rows + x0 + (width - 1) / 2
    y = yx * columns + yy * rows + y0 + (height - 1) / 2
    left, top = x.floor(), y.floor()
    share_x, share_y = x - left, y - top
    first = torch.arange(count, device=images.device)[:, None, None] * (height * width)
    indices, shares = [], []
    for row, row_share in ((top, 1 - share_y), (top + 1, share_y)):
        for column, column_share in ((left, 1 - share_x), (left + 1, share_x)):
            indices.append(first + _reflected(row, height) * width + _reflected(column, width))
            shares.append(row_share * column_share)
    # Indexing, unlike grid_sample, has a deterministic gradient on GPUs.
    pixels = images.permute(0, 2, 3, 1).flatten(0, 2)[torch.stack(indices)]
    return (pixels * torch.stack(shares)[..., None]).sum(0).permute(0, 3, 1, 2)


def _reflected(position: Tensor, side: int) -> Tensor:
    """Return the index of each whole position, reflected at the borders as often as needed."""
    inside = position.long().remainder(2 * side)
    return torch.where(inside >= side, 2 * side - 1 - inside, inside)


def _recolor(images: Tensor, numbers: _Numbers) -> Tensor:
    """Change brightness, contrast, the sign of the luma, hue and saturation."""

    def image_wise(values: Tensor) -> Tensor:
        return values[:, None, None, None]

    brightness = numbers.chosen("brightness", BRIGHTNESS_DEVIATION * numbers.normal("brightness"), 0.0)
    contrast = numbers.chosen("contrast", torch.exp2(CONTRAST_DEVIATION * numbers.normal("contrast")), 1.0)
    images = (images + image_wise(brightness)) * image_wise(contrast)
    is_flipped = numbers.chosen("luma_flip", (numbers.uniform("luma_flip") * 2).floor(), 0.0)
    images = images - 2 * image_wise(is_flipped) * images.mean(1, keepdim=True)
    if images.shape[1] != 3:
        return images
    # Rotate around the grey axis (Rodrigues), then scale the distance from it.
    angle = image_wise(numbers.chosen("hue", (2 * numbers.uniform("hue") - 1) * math.pi, 0.0))
    across = (images.roll(1, 1) - images.roll(-1, 1)) / math.sqrt(3)
    grey = images.mean(1, keepdim=True)
    images = images * angle.cos() + across * angle.sin() + grey * (1 - angle.cos())
    saturation = numbers.chosen("saturation", torch.exp2(SATURATION_DEVIATION * numbers.normal("saturation")), 1.0)
    return images + (images - grey) * (image_wise(saturation) - 1)


def _cut_out_square(images: Tensor, numbers: _Numbers) -> Tensor:
    """Replace a square with mid-grey (0). Its centre can be anywhere in the image, so part of it may be outside."""
    half = numbers.chosen("cutout", torch.full_like(numbers.strength, CUTOUT_SIDE / 2), 0.0)[:, None]

    def is_inside(side: int, number: int) -> Tensor:
        places = (torch.arange(side, device=images.device, dtype=images.dtype) + 0.5) / side
        return (places - numbers.uniform("cutout", number)[:, None]).abs() < half

    rows, columns = is_inside(images.shape[2], 1), is_inside(images.shape[3], 2)
    return torch.where((rows[:, :, None] & columns[:, None, :])[:, None], 0.0, images)
