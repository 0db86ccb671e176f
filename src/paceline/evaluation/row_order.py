"""The order of real images for metrics that use only some of them, or compare them in subsets."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from paceline.data.class_draws import LABEL
from paceline.data.source import Source

NUM_PAIRS = 1000  # pairs of neighbouring samples whose classes are compared
ORDER_KEY = 0


def random_positions(source: Source) -> Tensor | None:
    """Return a random position for each sample if samples of a class are neighbours, as in a folder; otherwise None.

    The first samples, or a subset of consecutive ones, would contain only a few of the classes.
    """
    if len(source) < 2 or not _is_grouped(source):
        return None
    return torch.from_numpy(np.random.Generator(np.random.Philox(key=ORDER_KEY)).permutation(len(source)))


def _is_grouped(source: Source) -> bool:
    """Return whether neighbours have the same class much more often than two random samples."""
    first = np.unique(np.linspace(0, len(source) - 2, NUM_PAIRS, dtype=np.int64))
    one, other = source.numbers_of(first), source.numbers_of(first + 1)
    if not one or not other or LABEL not in one:
        return False
    same = float(np.mean(one[LABEL] == other[LABEL]))
    shares = np.bincount(one[LABEL].astype(np.int64)) / len(first)
    by_chance = float(np.square(shares).sum())
    return by_chance < 1 and same > (1 + by_chance) / 2
