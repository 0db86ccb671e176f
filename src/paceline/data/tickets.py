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
CROP_ROW, CROP_COLUMN, FLIP, CUTOUT_ROW, CUTOUT_COLUMN, ROT90, COLOURS = range(7)


class Tickets(NamedTuple):
    """The tickets (indices and random numbers) of several samples, one row per sample."""

    index: NDArray[np.int64]  # type: ignore[assignment]  # [n]: sample indices in the source
    uniforms: NDArray[np.float32]  # shape [n, NUM_UNIFORMS]

    def rows(self, start: int, stop: int) -> Tickets:
        """Return the tickets for rows [start, stop)."""
        return Tickets(self.index[start:stop], self.uniforms[start:stop])


class Shuffle(NamedTuple):
    """How samples are shuffled: as a whole or, for sources with slow random access, in blocks.

    Blocks of consecutive samples are put in random order. Then the samples of `mixed` blocks at a time are shuffled
    together, so that reading an epoch touches only a few blocks at any time.
    """

    block: int = 0  # number of samples per block; 0 shuffles all samples together
    mixed: int = 1  # number of blocks whose samples are shuffled together


FULL = Shuffle()


@lru_cache(maxsize=2)
def tickets(seed: int, epoch: int, length: int, shuffle: Shuffle = FULL) -> Tickets:
    """Return the tickets for an epoch: a permutation of the samples, with a row of random numbers per position."""
    generator = np.random.Generator(np.random.Philox(key=np.array([seed, epoch], dtype=np.uint64)))
    order = _in_blocks(generator, length, shuffle) if shuffle.block else generator.permutation(length)
    return Tickets(order, generator.random((length, NUM_UNIFORMS), dtype=np.float32))


def _in_blocks(generator: np.random.Generator, length: int, shuffle: Shuffle) -> NDArray[np.int64]:
    """Return a permutation that shuffles blocks, and then the samples within groups of blocks."""
    starts = generator.permutation(np.arange(0, length, shuffle.block))
    blocks = [np.arange(start, min(start + shuffle.block, length)) for start in starts]
    groups = [np.concatenate(blocks[at : at + shuffle.mixed]) for at in range(0, len(blocks), shuffle.mixed)]
    return np.concatenate([generator.permutation(group) for group in groups])


class Stream:
    """The endless sequence of training samples, epoch after epoch. A position is the number of samples before it."""

    def __init__(self, seed: int, length: int, shuffle: Shuffle = FULL) -> None:
        self.seed, self.length, self.shuffle = seed, length, shuffle

    def take(self, start: int, stop: int) -> Tickets:
        """Return the tickets at positions [start, stop), which may span epochs."""
        pieces = []
        while start < stop:
            epoch, offset = divmod(start, self.length)
            count = min(stop - start, self.length - offset)
            pieces.append(tickets(self.seed, epoch, self.length, self.shuffle).rows(offset, offset + count))
            start += count
        return Tickets(np.concatenate([p.index for p in pieces]), np.concatenate([p.uniforms for p in pieces]))


def part(start: int, stop: int, number: int, parts: int) -> tuple[int, int]:
    """Split a range into `parts` contiguous parts, whose sizes differ by at most one; return part `number`."""
    length = stop - start
    return start + length * number // parts, start + length * (number + 1) // parts


def in_order(start: int, stop: int) -> Tickets:
    """Return tickets for evaluation: samples in source order, without randomness."""
    return Tickets(np.arange(start, stop), np.zeros((stop - start, NUM_UNIFORMS), dtype=np.float32))


def in_order_with_crops(start: int, stop: int, length: int) -> Tickets:
    """Return tickets for the evaluation of crops: at random places, which are the same in every run."""
    found = in_order(start, stop)
    found.uniforms[:, CROP_ROW : CROP_COLUMN + 1] = _places(length)[start:stop]
    return found


@lru_cache(maxsize=2)
def _places(length: int) -> NDArray[np.float32]:
    generator = np.random.Generator(np.random.Philox(key=0))
    return generator.random((length, CROP_COLUMN + 1 - CROP_ROW), dtype=np.float32)
