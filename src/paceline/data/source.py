"""The source contract: an indexable set of samples, read as they are.

A source knows nothing of batches, devices or augmentation. It is one file in `sources/` whose class takes the split and
the run's settings, to which it may add its own. A user's file works the same way.
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

Sample = dict[str, NDArray[Any]]  # images are uint8 [height, width, channels], numbers are int64 []


class Encoded(NamedTuple):
    """A sample as it is stored."""

    files: dict[str, Path]  # of each image
    numbers: Sample


class Source(HasSettings):
    """Subclass it in a file of its own: the file's name is the source's name. `Settings` holds its settings."""

    splits: ClassVar[tuple[str, ...]] = ("train", "test")
    decodes: ClassVar[bool] = True  # reading a sample costs more than copying it
    spec: DataSpec
    sizes: NDArray[np.int64] | None = None  # [n, 2]: height and width of each "image"; None: all have those of `spec`
    notes: tuple[str, ...] = ()  # what the user should know, e.g. how many files were left out; commands print them

    def __init__(self, split: str, settings: RunSettings) -> None:
        raise NotImplementedError

    @classmethod
    def splits_of(cls, settings: RunSettings) -> tuple[str, ...]:
        """Return the splits that the settings give: the class's own, unless the data decides."""
        return cls.splits

    @classmethod
    def measure_whole(cls, settings: RunSettings) -> RunSettings:
        """Return the settings under which a folder that was named for evaluation is measured as a whole.

        By default nothing changes: the test split is measured.
        """
        return settings

    def __len__(self) -> int:
        raise NotImplementedError

    def read(self, index: int) -> Sample:
        """Return one sample, decoded."""
        raise NotImplementedError

    def read_window(self, index: int, window: Window) -> Sample:
        """Return a window of one sample; a source that can read less than all of it overrides this."""
        return cut(self.read(index), window, self.spec.scale)

    def encoded(self, index: int) -> Encoded | None:
        """Return the sample's files, where `read` gives their images in colour, unchanged but for a cut.

        The cut is at the right and lower edge. None where `read` changes them otherwise, or there are no such files.
        """
        return None

    def files_of(self, index: int) -> Encoded | None:
        """Return all files from which `read` makes the sample, and its numbers; None where only `read` knows them."""
        return None

    def numbers_of(self, indices: NDArray[np.int64]) -> Sample | None:
        """Return the numbers of several samples (labels), stacked; None where only `read` knows them."""
        found = []
        for index in indices:
            sample = self.files_of(int(index))
            if sample is None:
                return None
            found.append(sample.numbers)
        return {name: np.stack([numbers[name] for numbers in found]) for name in found[0]}

    def name_of(self, index: int) -> str:
        """Return the name of a sample, for errors."""
        return f"sample {index}"

    def read_many(self, indices: NDArray[np.int64]) -> Sample:
        """Return several samples of one size, stacked; sources that hold arrays do this in one step."""
        samples = [self.read(int(index)) for index in indices]
        return {name: np.stack([sample[name] for sample in samples]) for name in samples[0]}


class ArraySource(Source):
    """A source in memory, as arrays with a row per sample."""

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

    def files_of(self, index: int) -> Encoded | None:
        return self.source.files_of(int(self.indices[index]))

    def numbers_of(self, indices: NDArray[np.int64]) -> Sample | None:
        return self.source.numbers_of(self.indices[indices])

    def name_of(self, index: int) -> str:
        return self.source.name_of(int(self.indices[index]))


def split_off(source: Source, fraction: float, seed: int) -> tuple[Source, Source]:
    """Split a source at random: return the part for training, and the `fraction` of samples for validation."""
    order = np.random.Generator(np.random.Philox(key=seed)).permutation(len(source))
    held_out = round(len(source) * fraction)
    return Subset(source, np.sort(order[held_out:])), Subset(source, np.sort(order[:held_out]))


def sizes_of(source: Source) -> NDArray[np.int64]:
    """Return height and width of each sample's "image", [n, 2]."""
    if source.sizes is not None:
        return source.sizes
    return np.full((len(source), 2), (source.spec.height, source.spec.width), dtype=np.int64)


def has_one_size(source: Source) -> bool:
    """Return whether whole samples of the source can share a batch."""
    return source.sizes is None or bool((source.sizes == source.sizes[0]).all())


def is_in_memory(source: Source) -> bool:
    """Return whether reading a sample costs next to nothing."""
    return isinstance(_underlying(source), ArraySource)


def decodes(source: Source) -> bool:
    """Return whether processes that read ahead are worth having."""
    return _underlying(source).decodes


def _underlying(source: Source) -> Source:
    while isinstance(source, Subset):
        source = source.source
    return source
