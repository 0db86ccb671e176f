"""Tickets: a sample's index and every random number that is used for it.

A ticket depends only on the seed and the position in the stream, never on rank, worker or strategy. So a run is the
same however it is distributed and wherever it resumes.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

NUM_UNIFORMS = 8  # random numbers in [0, 1) per sample
# The column of `uniforms` that each augmentation reads.
CROP_ROW, CROP_COLUMN, FLIP, CUTOUT_ROW, CUTOUT_COLUMN, ROT90 = range(6)


class Tickets(NamedTuple):
    """The tickets (indices and random numbers) of several samples, one row per sample."""

    index: NDArray[np.int64]  # type: ignore[assignment]  # [n]: sample indices in the source
    uniforms: NDArray[np.float32]  # shape [n, NUM_UNIFORMS]

    def rows(self, start: int, stop: int) -> Tickets:
        """Return the tickets for rows [start, stop)."""
        return Tickets(self.index[start:stop], self.uniforms[start:stop])


@lru_cache(maxsize=2)
def tickets(seed: int, epoch: int, length: int) -> Tickets:
    """Return the tickets for an epoch: a permutation of the samples, with a row of random numbers per position."""
    generator = np.random.Generator(np.random.Philox(key=np.array([seed, epoch], dtype=np.uint64)))
    return Tickets(generator.permutation(length), generator.random((length, NUM_UNIFORMS), dtype=np.float32))


class Stream:
    """The endless sequence of training samples, epoch after epoch. A position is the number of samples before it."""

    def __init__(self, seed: int, length: int) -> None:
        self.seed, self.length = seed, length

    def take(self, start: int, stop: int) -> Tickets:
        """Return the tickets at positions [start, stop), which may span epochs."""
        pieces = []
        while start < stop:
            epoch, offset = divmod(start, self.length)
            count = min(stop - start, self.length - offset)
            pieces.append(tickets(self.seed, epoch, self.length).rows(offset, offset + count))
            start += count
        return Tickets(np.concatenate([p.index for p in pieces]), np.concatenate([p.uniforms for p in pieces]))


def part(start: int, stop: int, number: int, parts: int) -> tuple[int, int]:
    """Split a range into `parts` contiguous parts, whose sizes differ by at most one; return part `number`."""
    length = stop - start
    return start + length * number // parts, start + length * (number + 1) // parts


def in_order(start: int, stop: int) -> Tickets:
    """Return tickets for evaluation: samples in source order, without randomness."""
    return Tickets(np.arange(start, stop), np.zeros((stop - start, NUM_UNIFORMS), dtype=np.float32))
