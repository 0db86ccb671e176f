"""The source contract: an indexable set of samples, read as they are.

A source knows nothing of batches, devices or augmentation. It is one file in `sources/` whose class
takes the split and the run's settings; a person's own file works the same way.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from hashlib import sha256
from typing import ClassVar

import numpy as np

from paceline.config import RunSettings
from paceline.recipe import Facts

FINGERPRINT_SAMPLES = 256  # read for a fingerprint where reading costs
Sample = dict[str, np.ndarray]  # pictures are uint8 [height, width, channels], numbers are int64 []


class Source:
    """Subclass it in a file of its own: the file's name is the source's name."""

    splits: ClassVar[tuple[str, ...]] = ("train", "test")
    facts: Facts
    notes: tuple[str, ...] = ()  # what a person should know, e.g. how many files were left out; the command prints them

    def __init__(self, split: str, settings: RunSettings) -> None:
        raise NotImplementedError

    def __len__(self) -> int:
        raise NotImplementedError

    def read(self, index: int) -> Sample:
        """One sample, decoded."""
        raise NotImplementedError

    def read_many(self, indices: np.ndarray) -> Sample:
        """Several samples of one size, stacked; sources that hold arrays do this in one step."""
        samples = [self.read(int(index)) for index in indices]
        return {name: np.stack([sample[name] for sample in samples]) for name in samples[0]}


class ArraySource(Source):
    """A source that already lies in memory, as arrays with a row per sample."""

    def __init__(self, arrays: Sample, facts: Facts) -> None:
        self.arrays, self.facts = arrays, facts

    def __len__(self) -> int:
        return len(next(iter(self.arrays.values())))

    def read(self, index: int) -> Sample:
        return {name: array[index] for name, array in self.arrays.items()}

    def read_many(self, indices: np.ndarray) -> Sample:
        return {name: array[indices] for name, array in self.arrays.items()}


class Subset(Source):
    """Some samples of another source, in a given order."""

    def __init__(self, source: Source, indices: Sequence[int] | np.ndarray) -> None:
        self.source, self.indices, self.facts = source, np.asarray(indices), source.facts

    def __len__(self) -> int:
        return len(self.indices)

    def read(self, index: int) -> Sample:
        return self.source.read(int(self.indices[index]))

    def read_many(self, indices: np.ndarray) -> Sample:
        return self.source.read_many(self.indices[indices])


def split_off(source: Source, fraction: float, seed: int) -> tuple[Source, Source]:
    """A source in two: the larger part for training and `fraction` of it for validation, by a seed of their own."""
    order = np.random.Generator(np.random.Philox(key=seed)).permutation(len(source))
    held_out = round(len(source) * fraction)
    return Subset(source, np.sort(order[held_out:])), Subset(source, np.sort(order[:held_out]))


def lies_in_memory(source: Source) -> bool:
    """Whether reading a sample costs next to nothing."""
    while isinstance(source, Subset):
        source = source.source
    return isinstance(source, ArraySource)


@lru_cache(maxsize=8)
def fingerprint(source: Source, samples: int = FINGERPRINT_SAMPLES) -> str:
    """A hash of the pictures: of all that lie in memory, else of some spread over the source, and of their number."""
    wanted = len(source) if lies_in_memory(source) else min(len(source), samples)
    digest = sha256(str(len(source)).encode())
    for indices in np.array_split(np.linspace(0, len(source) - 1, wanted).round().astype(np.int64), -(-wanted // 1024)):
        digest.update(source.read_many(indices)["image"].tobytes())
    return digest.hexdigest()[:32]
