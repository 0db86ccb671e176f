"""The source contract: an indexable set of samples, read without augmentation.

A source knows nothing about batches or devices. It is one file in `sources/`. Its class takes the split and the run's
settings, and can add settings of its own. A source in a user's file works the same way.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from paceline.config.settings import HasSettings, RunSettings
from paceline.contracts.recipe import DataSpec
from paceline.data.crop import Window, cut

Sample = dict[str, NDArray[Any]]  # images are uint8 [height, width, channels], numbers are int64 scalars


class Encoded(NamedTuple):
    """A sample before decoding."""

    files: dict[str, Path]  # the file of each image
    numbers: Sample


class Source(HasSettings):
    """Base class. Put each subclass in its own file, named after the source. `Settings` declares its settings."""

    splits: ClassVar[tuple[str, ...]] = ("train", "test")
    decodes: ClassVar[bool] = True  # whether reading a sample costs more than copying it
    spec: DataSpec
    sizes: NDArray[np.int64] | None = None  # [n, 2]: height and width of each "image"; None: all as in `spec`
    notes: tuple[str, ...] = ()  # messages that commands print, e.g. how many files were left out

    def __init__(self, split: str, settings: RunSettings) -> None:
        raise NotImplementedError

    @classmethod
    def splits_of(cls, settings: RunSettings) -> tuple[str, ...]:
        """Return the available splits: those of the class, unless they depend on the data."""
        return cls.splits

    @classmethod
    def measure_whole(cls, settings: RunSettings) -> RunSettings:
        """Return settings that evaluate all of the folder that the user chose for evaluation.

        By default the settings do not change, and the test split is evaluated.
        """
        return settings

    def __len__(self) -> int:
        raise NotImplementedError

    def read(self, index: int) -> Sample:
        """Return one sample, decoded."""
        raise NotImplementedError

    def read_window(self, index: int, window: Window) -> Sample:
        """Return a window of one sample; override it if the source can read less than the whole sample."""
        return cut(self.read(index), window, self.spec.scale)

    def encoded(self, index: int) -> Encoded | None:
        """Return the sample's files if `read` returns their RGB images unchanged, else None.

        A crop at the right and bottom edges is allowed. Loaders with their own decoder use this.
        """
        return None

    def made_of(self, index: int) -> Encoded | None:
        """Return all files that `read` uses for a sample, and its numbers; None if only `read` knows them."""
        return None

    def numbers_of(self, indices: NDArray[np.int64]) -> Sample | None:
        """Return the numbers (labels) of several samples, stacked; None if only `read` knows them."""
        found = []
        for index in indices:
            made_of = self.made_of(int(index))
            if made_of is None:
                return None
            found.append(made_of.numbers)
        return {name: np.stack([numbers[name] for numbers in found]) for name in found[0]}

    def name_of(self, index: int) -> str:
        """Return the name of a sample, for error messages."""
        return f"sample {index}"

    def read_many(self, indices: NDArray[np.int64]) -> Sample:
        """Return several samples of the same size, stacked; array sources do this in one step."""
        samples = [self.read(int(index)) for index in indices]
        return {name: np.stack([sample[name] for sample in samples]) for name in samples[0]}


class ArraySource(Source):
    """A source in memory: arrays with one row per sample."""

    decodes = False

    def __init__(self, arrays: Sample, spec: DataSpec) -> None:
        self.arrays, self.spec = arrays, spec

    def __len__(self) -> int:
        return len(next(iter(self.arrays.values())))

    def read(self, index: int) -> Sample:
        return {name: array[index] for name, array in self.arrays.items()}

    def numbers_of(self, indices: NDArray[np.int64]) -> Sample | None:
        return {name: array[indices] for name, array in self.arrays.items() if array.ndim == 1}

    def read_many(self, indices: NDArray[np.int64]) -> Sample:
        return {name: array[indices] for name, array in self.arrays.items()}


class Subset(Source):
    """Some samples of another source, in a given order."""

    def __init__(self, source: Source, indices: Sequence[int] | NDArray[np.int64]) -> None:
        self.source, self.indices, self.spec = source, np.asarray(indices), source.spec
        self.sizes = None if source.sizes is None else source.sizes[self.indices]

    def __len__(self) -> int:
        return len(self.indices)

    def read(self, index: int) -> Sample:
        return self.source.read(int(self.indices[index]))

    def read_many(self, indices: NDArray[np.int64]) -> Sample:
        return self.source.read_many(self.indices[indices])

    def read_window(self, index: int, window: Window) -> Sample:
        return self.source.read_window(int(self.indices[index]), window)

    def encoded(self, index: int) -> Encoded | None:
        return self.source.encoded(int(self.indices[index]))

    def made_of(self, index: int) -> Encoded | None:
        return self.source.made_of(int(self.indices[index]))

    def numbers_of(self, indices: NDArray[np.int64]) -> Sample | None:
        return self.source.numbers_of(self.indices[indices])

    def name_of(self, index: int) -> str:
        return self.source.name_of(int(self.indices[index]))


def split_off(source: Source, fraction: float, seed: int) -> tuple[Source, Source]:
    """Split a source at random; return the training samples and the `fraction` held out for validation."""
    order = np.random.Generator(np.random.Philox(key=seed)).permutation(len(source))
    held_out = round(len(source) * fraction)
    return Subset(source, np.sort(order[held_out:])), Subset(source, np.sort(order[:held_out]))


def sizes_of(source: Source) -> NDArray[np.int64]:
    """Return the height and width of each sample's "image", as an [n, 2] array."""
    if source.sizes is not None:
        return source.sizes
    return np.full((len(source), 2), (source.spec.height, source.spec.width), dtype=np.int64)


def has_one_size(source: Source) -> bool:
    """Return whether whole samples of the source can share a batch."""
    return source.sizes is None or bool((source.sizes == source.sizes[0]).all())


def lies_in_memory(source: Source) -> bool:
    """Return whether the samples are arrays in memory, which cost almost nothing to read."""
    return isinstance(_underlying(source), ArraySource)


def decodes(source: Source) -> bool:
    """Return whether prefetching in worker processes is worthwhile."""
    return _underlying(source).decodes


def _underlying(source: Source) -> Source:
    while isinstance(source, Subset):
        source = source.source
    return source
