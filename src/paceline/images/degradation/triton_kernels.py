"""Triton kernels that blur, resize or add noise to float32 images, each image in its own way.

A Triton program computes a tile of one plane of one image. It reads the image's own step, size and parameters, and
returns at once if the tile is outside of the image. So the time depends on the sizes of the images and not on the size
of their canvas, and a batch with different steps needs only one launch.

Columns that are almost contiguous are declared to be so (`tl.max_contiguous`), right after the operation that computes
them. Neighbouring threads then read neighbouring columns. Each thread still reads one number at a time, since nothing
is declared about the alignment; so columns that are not contiguous are read correctly, too.
"""

# Triton determines the types of kernel arguments itself.
# mypy: disable-error-code="untyped-decorator, no-untyped-def"

from __future__ import annotations

import math

import triton
import triton.language as tl

from paceline.contracts.pixel_format import LUMA
from paceline.images.degradation import kernels, numbers, resizing

ROWS, COLUMNS = 32, 32  # size of a tile
STEPS = ("blur", "resize", "noise")
BLUR, RESIZE = (tl.constexpr(STEPS.index(name)) for name in ("blur", "resize"))
SIDE, REACH = tl.constexpr(kernels.SIDE), tl.constexpr(kernels.SIDE // 2)
AREA, BILINEAR = tl.constexpr(resizing.AREA), tl.constexpr(resizing.BILINEAR)
BICUBIC_A = tl.constexpr(resizing.BICUBIC_A)
RED, GREEN, BLUE = (tl.constexpr(weight) for weight in LUMA)
POISSON_INVERSION_BELOW = tl.constexpr(numbers.POISSON_INVERSION_BELOW)
POISSON_TERMS = tl.constexpr(numbers.POISSON_TERMS)
FIELD_SHIFT, FIELD_UNIT = tl.constexpr(32 - numbers.FIELD_BITS), tl.constexpr(2.0**-numbers.FIELD_BITS)
SQRT_2 = tl.constexpr(math.sqrt(2))
ROUNDER = tl.constexpr(1.5 * 2**23)  # float32 numbers of this size are integers, so adding it rounds halves to even


@triton.jit(
    do_not_specialize=["source_width", "source_plane", "target_width", "target_plane", "field_width", "field_plane"]
)
def apply_steps(
    source, target, steps, heights, widths, kernels, reaches, new_heights, new_widths, filters,
    keys, strengths, gaussian, grey,
    source_width, source_plane, target_width, target_plane, field_width, field_plane,
    CHANNELS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Write one tile of an image after its step to `target`."""
    channel, image = tl.program_id(1), tl.program_id(2)
    step = tl.load(steps + image)
    height, width = tl.load(heights + image).to(tl.int32), tl.load(widths + image).to(tl.int32)
    rows, columns = height, width
    if step == RESIZE:
        rows, columns = tl.load(new_heights + image).to(tl.int32), tl.load(new_widths + image).to(tl.int32)
    across = tl.cdiv(target_width, COLUMNS)
    top, left = tl.program_id(0) // across * ROWS, tl.program_id(0) % across * COLUMNS
    if (top >= rows) | (left >= columns):
        return
    row, column = top + tl.arange(0, ROWS)[:, None], left + tl.arange(0, COLUMNS)[None, :]
    first = source + image.to(tl.int64) * CHANNELS * source_plane
    plane = first + channel * source_plane
    if step == BLUR:
        weights, reach = kernels + image * (SIDE * SIDE), tl.load(reaches + image).to(tl.int32)
        values = _blurred(plane, source_width, row, column, height, width, weights, reach)
    elif step == RESIZE:
        kind = tl.load(filters + image)
        values = _resized(plane, source_width, row, column, height, width, rows, columns, kind)
    else:
        at = tl.max_contiguous(tl.minimum(column, width - 1), [1, COLUMNS]) + tl.minimum(row, height - 1) * source_width
        is_grey = tl.load(grey + image)
        position = row * field_width + column + tl.where(is_grey, 0, channel) * field_plane
        uniform = _uniform(position, tl.load(keys + image))
        level, normal, strength = tl.load(plane + at), _normal(uniform), tl.load(strengths + image)
        if tl.load(gaussian + image):
            added = strength * normal
        else:
            mean = level
            if CHANNELS == 3:  # noqa: SIM102 - this condition is known when the kernel is compiled
                if is_grey:
                    red, green = tl.load(first + at), tl.load(first + source_plane + at)
                    blue = tl.load(first + 2 * source_plane + at)
                    mean = _clamped(red) * RED + _clamped(green) * GREEN + _clamped(blue) * BLUE
            mean = _clamped(mean)
            added = strength * (_poisson(uniform, normal, mean) - mean)
        values = _clamped(level + added)
    result = target + (image.to(tl.int64) * CHANNELS + channel) * target_plane
    tl.store(result + row * target_width + column, values, mask=(row < rows) & (column < columns))


@triton.jit
def _blurred(plane, stride, row, column, height, width, weights, reach):
    """Return the average of a tile's neighbours with relative weights, reflecting the image at its border."""
    centre = weights + REACH * SIDE + REACH
    row_folds, column_folds = _num_further_folds(height), _num_further_folds(width)
    sums = tl.zeros((row.shape[0], column.shape[1]), dtype=tl.float32)
    weight_sum = 0.0
    for down in range(-reach, reach + 1):
        start = plane + tl.maximum(_reflected(row + down, height, row_folds), 0) * stride
        for right in range(-reach, reach + 1):
            at = tl.maximum(_reflected(column + right, width, column_folds), 0)
            at = tl.max_contiguous(at, [1, column.shape[1]])
            weight = tl.load(centre + down * SIDE + right)
            sums += weight * tl.load(start + at)
            weight_sum += weight
    return sums / weight_sum


@triton.jit
def _num_further_folds(length):
    """Return how many reflections a pixel's neighbours need after the first: none, unless the image is very small."""
    last = tl.maximum(length - 1, 1)
    return (last + (REACH - 1)) // last - 1


@triton.jit
def _reflected(position, length, num_further_folds):
    """Return positions inside an image of this length; each fold reflects at both borders once.

    Positions far beyond the border, which belong to no pixel of the image, may become negative.
    """
    last = length - 1
    position = last - tl.abs(last - tl.abs(position))
    for _ in range(num_further_folds):
        position = last - tl.abs(last - tl.abs(position))
    return position


@triton.jit
def _resized(plane, stride, row, column, height, width, rows, columns, kind):
    """Return a tile of an image of `rows` × `columns`, made from an image of `height` × `width`."""
    row_ratio, column_ratio = _ratio(height, rows), _ratio(width, columns)
    row, column = tl.minimum(row, rows - 1).to(tl.float32), tl.minimum(column, columns - 1).to(tl.float32)
    first_row, first_column = _first_tap(row, row_ratio, height, kind), _first_tap(column, column_ratio, width, kind)
    sums = tl.zeros((row.shape[0], column.shape[1]), dtype=tl.float32)
    for down in range(_num_taps(row_ratio, kind)):
        row_weight = _tap_weight(row, first_row + down, row_ratio, height, kind)
        start = plane + tl.minimum(tl.maximum(first_row + down, 0), height - 1) * stride
        for right in range(_num_taps(column_ratio, kind)):
            weight = _tap_weight(column, first_column + right, column_ratio, width, kind)
            at = tl.minimum(tl.maximum(first_column + right, 0), width - 1)
            at = tl.max_contiguous(at, [1, column.shape[1]])
            sums += row_weight * (weight * tl.load(start + at))
    return sums


@triton.jit
def _ratio(old, new):
    return tl.math.div_rn(old.to(tl.float32), new.to(tl.float32))


@triton.jit
def _num_taps(ratio, kind):
    """Return how many pixels in a row contribute to a new pixel."""
    return tl.where(kind == AREA, tl.floor(ratio).to(tl.int32) + 2, tl.where(kind == BILINEAR, 2, 4))


@triton.jit
def _first_tap(target, ratio, old, kind):
    """Return the first pixel that contributes to each new pixel; it may be beyond the border."""
    centre = (target + 0.5) * ratio - 0.5
    cubic = tl.floor(centre) - 1
    linear = tl.floor(_inside(centre, old))
    return tl.where(kind == AREA, tl.floor(target * ratio), tl.where(kind == BILINEAR, linear, cubic)).to(tl.int32)


@triton.jit
def _tap_weight(target, source, ratio, old, kind):
    """Return the weights of the filters in `resizing`; pixels beyond the border have the weight of their distance."""
    source = source.to(tl.float32)
    centre = (target + 0.5) * ratio - 0.5
    start, stop = target * ratio, tl.minimum((target + 1) * ratio, old.to(tl.float32))
    area = tl.maximum(tl.minimum(stop, source + 1) - tl.maximum(start, source), 0.0) / (stop - start)
    linear = tl.maximum(1 - tl.abs(_inside(centre, old) - source), 0.0)
    far = tl.abs(centre - source)
    near = (far * (BICUBIC_A + 2) - (BICUBIC_A + 3)) * far * far + 1
    away = ((far * BICUBIC_A - 5 * BICUBIC_A) * far + 8 * BICUBIC_A) * far - 4 * BICUBIC_A
    cubic = tl.where(far <= 1, near, tl.where(far < 2, away, 0.0))
    return tl.where(kind == AREA, area, tl.where(kind == BILINEAR, linear, cubic))


@triton.jit
def _inside(centre, old):
    return tl.minimum(tl.maximum(centre, 0.0), (old - 1).to(tl.float32))


@triton.jit
def _uniform(position, key):
    """Return the numbers in (0, 1) of `numbers.uniform_field`."""
    bits = _hashed(_hashed(position.to(tl.uint32)) ^ key.to(tl.uint32)) >> FIELD_SHIFT
    return (bits.to(tl.float32) + 0.5) * FIELD_UNIT


@triton.jit
def _hashed(values):
    """Return the hash of `numbers`; products of 32-bit integers keep their lower 32 bits."""
    values = (values ^ (values >> 16)) * 0x21F0AAAD
    values = (values ^ (values >> 15)) * 0x735A2D97
    return values ^ (values >> 15)


@triton.jit
def _normal(uniform):
    """Return standard normal quantiles.

    They are √2 · erfinv(2u - 1), with the polynomials of Giles, Approximating the erfinv function (2010).
    """
    w = -tl.log(4 * uniform * (1 - uniform))
    x = w - 2.5
    middle = 2.81022636e-08 * x + 3.43273939e-07
    middle = middle * x - 3.5233877e-06
    middle = middle * x - 4.39150654e-06
    middle = middle * x + 0.00021858087
    middle = middle * x - 0.00125372503
    middle = middle * x - 0.00417768164
    middle = middle * x + 0.246640727
    middle = middle * x + 1.50140941
    x = tl.sqrt(w) - 3
    tail = -0.000200214257 * x + 0.000100950558
    tail = tail * x + 0.00134934322
    tail = tail * x - 0.00367342844
    tail = tail * x + 0.00573950773
    tail = tail * x - 0.0076224613
    tail = tail * x + 0.00943887047
    tail = tail * x + 1.00167406
    tail = tail * x + 2.83297682
    return (2 * uniform - 1) * SQRT_2 * tl.where(w < 5, middle, tail)


@triton.jit
def _poisson(uniform, normal, mean):
    """Return the Poisson quantiles of `numbers.to_poisson`."""
    small = tl.minimum(mean, POISSON_INVERSION_BELOW)
    term = tl.exp(-small)
    total, count = term, tl.zeros_like(mean)
    for number in tl.static_range(1, POISSON_TERMS + 1):
        count += (uniform > total).to(tl.float32)
        term = term * small / number
        total += term
    large = tl.maximum(rounded(mean + tl.sqrt(mean) * normal + (normal * normal - 1) / 6), 0.0)
    return tl.where(mean < POISSON_INVERSION_BELOW, count, large)


@triton.jit
def rounded(values):
    """Round to integers, and halves to even integers."""
    return (values + ROUNDER) - ROUNDER


@triton.jit
def _clamped(levels):
    return tl.minimum(tl.maximum(levels, 0.0), 255.0)
