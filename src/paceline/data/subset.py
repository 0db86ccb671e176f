"""Subsets of a source's samples, and properties of the source behind a subset."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from paceline.data.crop import Window
from paceline.data.source import ArraySource, Encoded, Sample, Source


class Subset(Source):
    """A subset of another source's samples, in a given order."""

    def __init__(self, source: Source, indices: Sequence[int] | NDArray[np.int64]) -> None:
        self.source, self.indices, self.spec = source, np.asarray(indices), source.spec
        self.sizes = None if source.sizes is None else source.sizes[self.indices]
        self.shuffle, self.lookahead = source.shuffle, source.lookahead

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

    def checksums_of(self, indices: NDArray[np.int64]) -> NDArray[np.int64] | None:
        return self.source.checksums_of(self.indices[indices])

    def originals(self, index: int) -> Encoded | None:
        return self.source.originals(int(self.indices[index]))

    def prefetch(self, indices: NDArray[np.int64]) -> None:
        self.source.prefetch(self.indices[indices])

    def numbers_of(self, indices: NDArray[np.int64]) -> Sample | None:
        return self.source.numbers_of(self.indices[indices])

    def name_of(self, index: int) -> str:
        return self.source.name_of(int(self.indices[index]))


def split_off(source: Source, fraction: float, seed: int) -> tuple[Source, Source]:
    """Split a source at random; return the training samples and the `fraction` held out for validation."""
    order = np.random.Generator(np.random.Philox(key=seed)).permutation(len(source))
    held_out = round(len(source) * fraction)
    return Subset(source, np.sort(order[held_out:])), Subset(source, np.sort(order[:held_out]))


def is_in_memory(source: Source) -> bool:
    """Return whether the samples are arrays in memory, which are fast to read."""
    return isinstance(_underlying(source), ArraySource)


def decodes(source: Source) -> bool:
    """Return whether samples are slow to read, so that prefetching in worker processes is worthwhile."""
    return _underlying(source).decodes


def _underlying(source: Source) -> Source:
    while isinstance(source, Subset):
        source = source.source
    return source
