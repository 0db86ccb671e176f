"""The random parameters of a second-order degradation, computed from each sample's own uniform numbers.

The ranges are those of Wang et al., Real-ESRGAN (2021). All tensors have one entry per image.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.images.degradation.operations import (
    NUM_BLUR_NUMBERS,
    NUM_FILTERS,
    NUM_NOISE_NUMBERS,
    NUM_SINC_NUMBERS,
    NoiseParameters,
    Numbers,
    between,
    pick,
    random_blur_kernels,
    random_noise,
    random_sinc_kernels,
)

NUM_RESIZE_NUMBERS = 3
NUM_JPEG_NUMBERS = 1
NUM_ROUND_NUMBERS = NUM_BLUR_NUMBERS + NUM_RESIZE_NUMBERS + NUM_NOISE_NUMBERS + NUM_JPEG_NUMBERS
NUM_FINAL_NUMBERS = 1 + 1 + NUM_SINC_NUMBERS + NUM_JPEG_NUMBERS  # order, filter, sinc kernel, quality
NUM_NUMBERS = 2 * NUM_ROUND_NUMBERS + NUM_FINAL_NUMBERS
NUM_ORDER_NUMBERS = 2  # one for each round
FINAL_SINC_PROBABILITY = 0.8
ORDERS = (  # the six orders of a round's steps
    "resize noise blur",
    "resize blur noise",
    "noise resize blur",
    "noise blur resize",
    "blur resize noise",
    "blur noise resize",
)


@dataclass(frozen=True)
class Round:
    """The ranges and probabilities of one round of degradation."""

    blur_probability: float
    sinc_probability: float  # the probability that a blur kernel is a sinc kernel
    max_blur_sigma: float  # in px
    up_probability: float
    down_probability: float  # the size of the remaining images does not change
    smallest_scale: float
    largest_scale: float
    max_noise_sigma: float  # in levels
    max_poisson: float  # factor of the Poisson noise
    jpeg_quality: tuple[int, int]


# The values in section 4.1 of the paper and in the appendix.
FIRST = Round(1.0, 0.1, 3.0, 0.2, 0.7, 0.15, 1.5, 30.0, 3.0, (30, 95))
SECOND = Round(0.8, 0.1, 1.5, 0.3, 0.4, 0.3, 1.2, 25.0, 2.5, (30, 95))


@dataclass(frozen=True)
class Resize:
    """The sizes and filters with which images are resized."""

    height: Tensor  # new height of each image in px, int64 [n]
    width: Tensor  # new width of each image in px, int64 [n]
    filters: Tensor  # AREA, BILINEAR or BICUBIC, int64 [n]
    shape: tuple[int, int]  # a canvas that is large enough for every new size


@dataclass(frozen=True)
class RoundParameters:
    """The parameters of one round for each image of a batch."""

    kernels: Tensor  # relative weights [n, SIDE, SIDE]
    resize: Resize
    noise: NoiseParameters
    quality: Tensor  # int64 [n]
    order: Tensor | None  # index into ORDERS, int64 [n]; None for the order of the paper: blur, resize, noise


@dataclass(frozen=True)
class FinalParameters:
    """The parameters of the last resizing, sinc filter and compression for each image of a batch."""

    jpeg_first: Tensor  # whether the compression comes before the other two steps, bool [n]
    resize: Resize
    kernels: Tensor  # relative weights [n, SIDE, SIDE]
    quality: Tensor  # int64 [n]


def draw_round(numbers: Numbers, settings: Round, height: int, width: int, order: Tensor | None) -> RoundParameters:
    """Return the parameters of a round; sizes are relative to `height` × `width`, and `order` is in [0, 1)."""
    kernels = random_blur_kernels(
        numbers, settings.blur_probability, settings.sinc_probability, settings.max_blur_sigma
    )
    direction, amount, chosen = numbers.take(NUM_RESIZE_NUMBERS)
    scale = random_scale(direction, amount, settings)
    sizes = [(scale * side).long().clamp(min=1) for side in (height, width)]
    largest = (int(height * settings.largest_scale), int(width * settings.largest_scale))
    return RoundParameters(
        kernels,
        Resize(sizes[0], sizes[1], pick(chosen, NUM_FILTERS), largest),
        random_noise(numbers, settings.max_noise_sigma, settings.max_poisson),
        _quality(numbers, settings),
        None if order is None else pick(order, len(ORDERS)),
    )


def draw_final(numbers: Numbers, settings: Round, height: int, width: int) -> FinalParameters:
    """Return the parameters of the last steps, which produce images of `height` × `width`."""
    order, chosen = numbers.take(2)
    rows, columns = (torch.full_like(order, side, dtype=torch.int64) for side in (height, width))
    return FinalParameters(
        order < 0.5,
        Resize(rows, columns, pick(chosen, NUM_FILTERS), (height, width)),
        random_sinc_kernels(numbers, FINAL_SINC_PROBABILITY),
        _quality(numbers, settings),
    )


def random_scale(direction: Tensor, amount: Tensor, settings: Round) -> Tensor:
    """Return a scale above 1, below 1 or equal to 1 for each image."""
    up, down = between(amount, 1, settings.largest_scale), between(amount, settings.smallest_scale, 1)
    is_up, is_down = direction < settings.up_probability, direction >= 1 - settings.down_probability
    return torch.where(is_up, up, torch.where(is_down, down, torch.ones_like(up)))


def _quality(numbers: Numbers, settings: Round) -> Tensor:
    low, high = settings.jpeg_quality
    (uniform,) = numbers.take(NUM_JPEG_NUMBERS)
    return low + pick(uniform, high - low + 1)
