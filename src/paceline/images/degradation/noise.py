"""Gaussian and Poisson noise with a separate strength for each image, in colour or equal in all channels."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from paceline.contracts.pixel_format import EIGHT_BITS, LUMA, PixelFormat
from paceline.images.degradation.canvas import Canvas
from paceline.images.degradation.numbers import (
    Numbers,
    between,
    field_keys,
    to_normal,
    to_poisson,
    uniform_field,
)

SMALLEST_SIGMA, SMALLEST_POISSON = 1.0, 0.05
GAUSSIAN_PROBABILITY = 0.5  # the other images get Poisson noise
GREY_PROBABILITY = 0.4
NUM_NOISE_NUMBERS = 5
HALF = 127.5  # 8-bit levels per unit of images in [-1, 1]


class NoiseParameters(NamedTuple):
    """The parameters of each image's noise, tensors [n]."""

    keys: Tensor  # keys of the fields of random numbers
    strength: Tensor  # standard deviation of Gaussian noise in levels, or the factor of Poisson noise
    is_gaussian: Tensor  # whether the image gets Gaussian instead of Poisson noise
    is_grey: Tensor  # whether all channels get the same noise


class Noise(NamedTuple):
    """The noise of a batch: fields [n, c, h, w] of random numbers, and the parameters of each image."""

    uniform: Tensor  # field of numbers in (0, 1)
    normal: Tensor  # the standard normal quantiles of `uniform`
    parameters: NoiseParameters

    def apply(self, canvas: Canvas) -> Canvas:
        """Add the noise to each image, and clip the result to 0…255."""
        _, strength, is_gaussian, is_grey = self.parameters
        poisson = poisson_noise(canvas.pixels, self.uniform, self.normal, strength, is_grey)
        noise = torch.where(_column(is_gaussian), _column(strength) * self.normal, poisson)
        return canvas.replaced((canvas.pixels + noise).clamp(0, 255))


def random_noise(numbers: Numbers, max_sigma: float, max_poisson: float) -> NoiseParameters:
    """Return the parameters of Gaussian or Poisson noise of random strength for each image."""
    kind, strength, grey, *seeds = numbers.take(NUM_NOISE_NUMBERS)
    sigma = between(strength, min(SMALLEST_SIGMA, max_sigma), max_sigma)
    scale = between(strength, min(SMALLEST_POISSON, max_poisson), max_poisson)
    is_gaussian = kind < GAUSSIAN_PROBABILITY
    return NoiseParameters(
        field_keys(*seeds), torch.where(is_gaussian, sigma, scale), is_gaussian, is_grey=grey < GREY_PROBABILITY
    )


def make_noise(parameters: NoiseParameters, shape: tuple[int, ...]) -> Noise:
    """Return noise for images on a canvas of the shape [c, h, w]."""
    uniform = _shared(uniform_field(parameters.keys, shape, parameters.strength.dtype), parameters.is_grey)
    return Noise(uniform, to_normal(uniform), parameters)


def add_gaussian_noise(images: Tensor, seeds: Tensor, sigma: float, pixels: PixelFormat = EIGHT_BITS) -> Tensor:
    """Return images in [-1, 1] with Gaussian noise, rounded to the levels of the pixel format.

    `seeds` are two uniform numbers per image, [n, 2], which determine its noise. `sigma` is on a scale from 0 to 255.
    """
    normal = to_normal(uniform_field(field_keys(seeds[:, 0], seeds[:, 1]), images.shape[1:], seeds.dtype))
    if not pixels.is_integer:
        return (images + (sigma / HALF) * normal).clamp(-1, 1)
    levels = (images + 1) * pixels.half + sigma * (pixels.half / HALF) * normal
    return levels.round().clamp(0, pixels.span) / pixels.half - 1


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
