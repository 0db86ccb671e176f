"""Gaussian and Poisson noise with a strength of its own for each image, in colour or equal in all channels."""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.images.degradation.canvas import Canvas
from paceline.images.degradation.numbers import Numbers, between, to_normal, to_poisson, uniform_field

LUMA = (0.299, 0.587, 0.114)
SMALLEST_SIGMA, SMALLEST_POISSON = 1.0, 0.05
GAUSSIAN_PROBABILITY = 0.5  # the other images get Poisson noise
GREY_PROBABILITY = 0.4
NUM_NOISE_NUMBERS = 5
HALF = 127.5  # 8-bit levels per unit of images in [-1, 1]


def random_noise(canvas: Canvas, numbers: Numbers, max_sigma: float, max_poisson: float) -> Canvas:
    """Add Gaussian or Poisson noise of random strength to each image, and clip the result to 0…255."""
    kind, strength, grey, *seeds = numbers.take(NUM_NOISE_NUMBERS)
    is_grey = grey < GREY_PROBABILITY
    uniform = _shared(uniform_field((seeds[0], seeds[1]), canvas.pixels.shape[1:]), is_grey)
    normal = to_normal(uniform)
    sigma = between(strength, min(SMALLEST_SIGMA, max_sigma), max_sigma)
    scale = between(strength, min(SMALLEST_POISSON, max_poisson), max_poisson)
    poisson = poisson_noise(canvas.pixels, uniform, normal, scale, is_grey)
    noise = torch.where(_column(kind < GAUSSIAN_PROBABILITY), _column(sigma) * normal, poisson)
    return canvas.replaced((canvas.pixels + noise).clamp(0, 255))


def add_gaussian_noise(images: Tensor, seeds: Tensor, sigma: float) -> Tensor:
    """Return images in [-1, 1] with Gaussian noise, rounded to 8 bits.

    `seeds` are two uniform numbers per image, [n, 2], which determine its noise. `sigma` is on a scale from 0 to 255.
    """
    normal = to_normal(uniform_field((seeds[:, 0], seeds[:, 1]), images.shape[1:]))
    levels = (images + 1) * HALF + sigma * normal
    return levels.round().clamp(0, 2 * HALF) / HALF - 1


def poisson_noise(levels: Tensor, uniform: Tensor, normal: Tensor, scale: Tensor, is_grey: Tensor) -> Tensor:
    """Return scale · (k - x), where k is a Poisson number whose mean is the level x.

    Grey noise is computed from the luma of the image, and is the same in all channels.
    """
    levels = levels.clamp(0, 255)
    if levels.shape[1] == 3:
        red, green, blue = levels.split(1, dim=1)
        luma = (LUMA[0] * red + LUMA[1] * green + LUMA[2] * blue).expand_as(levels)
        levels = torch.where(_column(is_grey), luma, levels)
    return _column(scale) * (to_poisson(uniform, normal, levels) - levels)


def _shared(uniform: Tensor, is_grey: Tensor) -> Tensor:
    """Use the field of the first channel for all channels of the images with grey noise."""
    return torch.where(_column(is_grey), uniform[:, :1].expand_as(uniform), uniform)


def _column(values: Tensor) -> Tensor:
    return values[:, None, None, None]
