"""All samples of a source in memory: one tensor per field, from which windows or whole images are gathered.

Images of the same size are stored as [n, h, w, c]; images of different sizes are concatenated as [pixels, c].
"""

from __future__ import annotations

from contextlib import closing
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.contracts.recipe import Batch
from paceline.core.activity import Counter
from paceline.data.crop import corners
from paceline.data.source import Source, has_one_size, sizes_of
from paceline.data.stored_pixels import IMAGE_TYPES, stored
from paceline.data.tickets import Tickets
from paceline.data.transfer import channels_first
from paceline.data.whole_source import read_in_order

BYTES_PER_READ = 64 * 2**20  # samples are read in pieces, so that host memory never contains all of them twice


class Pixels:
    """Every sample of a source on one device."""

    def __init__(self, source: Source, device: torch.device, num_workers: int) -> None:
        self.one_size, self.scale = has_one_size(source), source.spec.scale
        sizes = sizes_of(source)
        self.sizes = torch.from_numpy(sizes).to(device)
        self._host_sizes = sizes
        self._host_offsets = {ratio: _offsets(sizes, ratio) for ratio in {1, max(1, self.scale)}}
        self._offsets = {ratio: torch.from_numpy(found).to(device) for ratio, found in self._host_offsets.items()}
        self.samples = _read_all(source, device, num_workers, self._host_offsets)

    def rows(self, index: Tensor) -> Batch:
        """Return whole samples, which must have the same size, without waiting for the device."""
        return channels_first({name: every.index_select(0, index) for name, every in self.samples.items()})

    def whole(self, number: int) -> Batch:
        """Return one whole sample, of any size."""
        found = {}
        for name, every in self.samples.items():
            if _are_pixels(every):
                ratio = self._ratio(name)
                height, width = (self._host_sizes[number] // ratio).tolist()
                start = int(self._host_offsets[ratio][number])
                found[name] = every[start : start + height * width].view(1, height, width, -1)
            else:
                found[name] = every[number : number + 1]
        return channels_first(found)

    def windows(self, index: Tensor, uniforms: Tensor, crop: int) -> Batch:
        """Return a random crop of each sample without waiting for the device. All shapes are fixed."""
        sizes = self.sizes.index_select(0, index)
        corner = corners(uniforms, sizes, crop, self.scale)
        places: dict[int, Tensor] = {}  # flat index of each output pixel, by downsampling ratio
        found = {}
        for name, every in self.samples.items():
            if every.ndim < 2:
                found[name] = every.index_select(0, index)
                continue
            ratio = self._ratio(name)
            side = crop // ratio
            if ratio not in places:
                along = _counting(side, index.device)
                rows, columns = (corner // ratio)[:, :, None].add(along).unbind(1)
                start = self._offsets[ratio].index_select(0, index)[:, None, None]
                width = (sizes[:, 1] // ratio)[:, None, None]
                places[ratio] = (start + rows[:, :, None] * width + columns[:, None, :]).reshape(-1)
            channels = every.shape[-1]
            picked = every.view(-1, channels).index_select(0, places[ratio])
            found[name] = picked.view(len(index), side, side, channels)
        return channels_first(found)

    def _ratio(self, name: str) -> int:
        return self.scale if name == "low" and self.scale else 1


@lru_cache(maxsize=8)
def _counting(count: int, device: torch.device) -> Tensor:
    return torch.arange(count, device=device)


def _are_pixels(field: Tensor) -> bool:
    return field.dtype in IMAGE_TYPES and field.ndim == 2


def _offsets(sizes: NDArray[np.int64], ratio: int) -> NDArray[np.int64]:
    """Return the offset of each image in the concatenated pixels, and the end of the last image."""
    return np.concatenate([[0], np.cumsum((sizes // ratio).prod(axis=1))]).astype(np.int64)


def _read_all(source: Source, device: torch.device, num_workers: int, offsets: dict[int, NDArray[np.int64]]) -> Batch:
    one_size, start = has_one_size(source), 0
    samples: Batch = {}
    counter = Counter("reading images into memory", len(source))
    with closing(read_in_order(source, num_workers, BYTES_PER_READ)) as pieces, counter:
        for piece in pieces:
            counter.update(start)
            for name, field in piece.items():
                if name in Tickets._fields:
                    continue
                field = stored(field)
                if one_size or field.ndim < 4:
                    shape, first, values = (len(source), *field.shape[1:]), start, field
                else:
                    found = offsets[max(1, source.spec.scale) if name == "low" else 1]
                    shape, first, values = (int(found[-1]), field.shape[-1]), int(found[start]), field.flatten(0, 2)
                if name not in samples:
                    samples[name] = torch.empty(shape, dtype=field.dtype, device=device)
                samples[name][first : first + len(values)] = values
            start += len(piece["index"])
    return samples
