"""Random numbers of a degradation: uniform numbers per sample, and fields of noise derived from them.

A field has one number per pixel. It is a hash of the pixel's position and of two of the sample's random numbers, so it
needs no generator, is the same for any batch and any number of devices, and can be part of a CUDA graph.
"""

from __future__ import annotations

import math
from functools import cache

import torch
from torch import Tensor

SEED_RANGE = 1 << 24  # float32 numbers drawn from [0, 1) have 24 random bits
FIELD_BITS = 23  # random bits per number of a field: float32 represents (k + 0.5) / 2²³ exactly
MASK = 0xFFFFFFFF
POISSON_INVERSION_BELOW = 5.0  # mean below which the exact inversion is used instead of a normal approximation
POISSON_TERMS = 20  # terms of the inversion; the rest has a probability below 1e-6 for the largest mean


class Numbers:
    """The columns of a table [n, k] of uniform random numbers, each handed out once."""

    def __init__(self, table: Tensor) -> None:
        self.table, self.used = table, 0

    def take(self, count: int) -> tuple[Tensor, ...]:
        """Return the next `count` columns, each a tensor [n]."""
        self.used += count
        assert self.used <= self.table.shape[1], f"{self.table.shape[1]} random numbers are too few"
        return self.table[:, self.used - count : self.used].unbind(1)


# Cached for the life of the process, because a CUDA graph cannot copy values from the CPU.
@cache
def constant(values: tuple[float, ...], device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return numbers as a tensor on a device."""
    return torch.tensor(values, dtype=dtype, device=device)


def between(uniform: Tensor, low: float, high: float) -> Tensor:
    """Map numbers in [0, 1) to [low, high)."""
    return low + (high - low) * uniform


def pick(uniform: Tensor, count: int) -> Tensor:
    """Map numbers in [0, 1) to integers below `count`."""
    return (uniform * count).long()


def field_keys(first_seed: Tensor, second_seed: Tensor) -> Tensor:
    """Return the 32-bit keys [n] of fields from two seeds per sample, which are numbers in [0, 1)."""
    first, second = (pick(seed, SEED_RANGE) for seed in (first_seed, second_seed))
    return _hashed(_hashed(first) ^ second)


def uniform_field(keys: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return numbers in (0, 1) of the shape [n, *shape] from one key per sample."""
    position = _hashed(torch.arange(math.prod(shape), device=keys.device))
    bits = _hashed(position[None] ^ keys[:, None]) >> (32 - FIELD_BITS)
    return ((bits.to(dtype) + 0.5) * 2.0**-FIELD_BITS).view(-1, *shape)


def to_normal(uniform: Tensor) -> Tensor:
    """Return the standard normal quantiles of numbers in (0, 1)."""
    return math.sqrt(2) * torch.erfinv(2 * uniform - 1)


def to_poisson(uniform: Tensor, normal: Tensor, mean: Tensor) -> Tensor:
    """Return Poisson quantiles of numbers in (0, 1): exact for small means, otherwise within about one count.

    `normal` contains the standard normal quantiles of the same numbers. For larger means, a
    Cornish-Fisher expansion corrects the normal approximation for skewness.
    """
    small = mean.clamp(0, POISSON_INVERSION_BELOW)
    term = (-small).exp()
    total, count = term, torch.zeros_like(mean)
    for number in range(1, POISSON_TERMS + 1):
        count = count + (uniform > total).to(count.dtype)
        term = term * small / number
        total = total + term
    large = (mean + mean.clamp(min=0).sqrt() * normal + (normal.square() - 1) / 6).round().clamp(min=0)
    return torch.where(mean < POISSON_INVERSION_BELOW, count, large)


def _hashed(values: Tensor) -> Tensor:
    """Return a hash of 32-bit integers that are stored as int64; the factors are too small to overflow 63 bits."""
    values = ((values ^ (values >> 16)) * 0x21F0AAAD) & MASK
    values = ((values ^ (values >> 15)) * 0x735A2D97) & MASK
    return values ^ (values >> 15)
