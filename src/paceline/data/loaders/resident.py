"""Keeps the whole source in memory, with the pixels as stored: on the device if it fits, otherwise on the host."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import closing
from functools import lru_cache
from itertools import islice
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.contracts.recipe import Batch
from paceline.core.ordered_map import ordered_map
from paceline.core.terminal import Counter
from paceline.data.loader import Budget, Fit, Loader
from paceline.data.source import Source, has_one_size, sizes_of
from paceline.data.stream import IMAGE_TYPES, Tickets, channels_first, corners, ratio_of, stored, upload
from paceline.data.worker_pool import num_readers, read_in_order

CPU = torch.device("cpu")
REQUESTS_PER_UPLOAD = 64  # number of requests copied to the device together, since each is small


class Resident(Loader):
    """Reads every sample once, at the start. After that, a batch needs one gather operation and no waiting.

    If the samples do not fit on the device, they stay in host memory, where batches are gathered ahead of time.
    """

    description = "keeps all decoded samples in memory"
    auto_order = 0

    @classmethod
    def fits(cls, source: Source, device: torch.device, budget: Budget) -> Fit:
        """Return whether all samples fit, and where: on the device or else in host memory."""
        fits, why = budget.take(source, device)
        if fits:
            return Fit(True, why, device)
        if device.type == "cpu":
            return Fit(False, why)
        fits, host_why = budget.take(source, CPU)
        why = f"{why}; {host_why}"
        return Fit(True, f"{why}: batches are gathered in host memory", CPU) if fits else Fit(False, why)

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.pixels = Pixels(self.source, self.home, num_readers(self.settings))

    def fetch(self, requests: Iterable[Tickets]) -> Iterator[Batch]:
        if self._picks_on_device:
            return self._tickets(requests)
        return self._whole_images(requests) if self.home == self.device else self._pick_on_host(requests)

    def finish(self, fetched: Batch) -> Batch:
        return self._pick(fetched) if self._picks_on_device else fetched

    def close(self) -> None:
        self.pixels.samples.clear()

    @property
    def _picks_on_device(self) -> bool:
        """Whether batches are gathered on the device, which requires images of one size."""
        return self.home == self.device and bool(self.crop or self.pixels.one_size)

    def _pick(self, tickets: Batch) -> Batch:
        if self.crop:
            return self.pixels.windows(tickets["index"], tickets["uniforms"], self.crop) | tickets
        if self.pixels.one_size:
            return self.pixels.rows(tickets["index"]) | tickets
        (number,) = tickets["index"].tolist()
        return self.pixels.whole(number) | tickets

    def _tickets(self, requests: Iterable[Tickets]) -> Iterator[Batch]:
        requests = iter(requests)
        while together := list(islice(requests, REQUESTS_PER_UPLOAD)):
            tickets = upload(_concatenate(together), self.device)
            lengths = [len(request.index) for request in together]
            for columns in zip(*(column.split_with_sizes(lengths) for column in tickets.values()), strict=True):
                yield dict(zip(tickets, columns, strict=True))

    def _whole_images(self, requests: Iterable[Tickets]) -> Iterator[Batch]:
        """Yield one image per batch. The host selects the images, because they differ in shape."""
        for request in requests:
            (number,) = request.index.tolist()
            yield self.pixels.whole(number) | upload(_concatenate([request]), self.device)

    def _pick_on_host(self, requests: Iterable[Tickets]) -> Iterator[Batch]:
        with closing(ordered_map(self._pick_pinned, requests, 1)) as picked:
            yield from (upload(batch, self.device) for batch in picked)

    def _pick_pinned(self, request: Tickets) -> Batch:
        picked = self._pick(_concatenate([request]))
        return {name: field.pin_memory() for name, field in picked.items()} if self.device.type == "cuda" else picked


def _concatenate(requests: list[Tickets]) -> Batch:
    columns = zip(*requests, strict=True)
    return {
        name: torch.from_numpy(np.concatenate(column)) for name, column in zip(Tickets._fields, columns, strict=True)
    }


BYTES_PER_READ = 64 * 2**20  # samples are read in pieces, so that host memory never contains all of them twice


class Pixels:
    """Every sample of a source on one device."""

    def __init__(self, source: Source, device: torch.device, num_workers: int) -> None:
        self.one_size, self.scale, self._host_sizes = has_one_size(source), source.spec.scale, sizes_of(source)
        self.sizes = torch.from_numpy(self._host_sizes).to(device)
        self._host_offsets = {ratio: _offsets(self._host_sizes, ratio) for ratio in {1, max(1, self.scale)}}
        self._offsets = {ratio: torch.from_numpy(each).to(device) for ratio, each in self._host_offsets.items()}
        self.samples: Batch = {}
        start = 0
        counter = Counter("reading images into memory", len(source))
        with closing(read_in_order(source, num_workers, BYTES_PER_READ)) as pieces, counter:
            for piece in pieces:
                counter.update(start)
                for name in (name for name in piece if name not in Tickets._fields):
                    self._store(name, stored(piece[name]), start, len(source))
                start += len(piece["index"])

    def _store(self, name: str, field: Tensor, start: int, length: int) -> None:
        """Copy a field of the samples from `start` on; images of different sizes are concatenated pixel by pixel."""
        if not self.one_size and field.ndim == 4:
            offsets = self._host_offsets[ratio_of(name, self.scale)]
            field, start, length = field.flatten(0, 2), int(offsets[start]), int(offsets[-1])
        if name not in self.samples:
            self.samples[name] = torch.empty((length, *field.shape[1:]), dtype=field.dtype, device=self.sizes.device)
        self.samples[name][start : start + len(field)] = field

    def rows(self, index: Tensor) -> Batch:
        """Return whole samples, which must have the same size, without waiting for the device."""
        return channels_first({name: every.index_select(0, index) for name, every in self.samples.items()})

    def whole(self, number: int) -> Batch:
        """Return one whole sample, of any size."""
        sample = {}
        for name, every in self.samples.items():
            sample[name] = every[number : number + 1]
            if every.dtype in IMAGE_TYPES and every.ndim == 2:
                ratio = ratio_of(name, self.scale)
                height, width = (self._host_sizes[number] // ratio).tolist()
                start = int(self._host_offsets[ratio][number])
                sample[name] = every[start : start + height * width].view(1, height, width, -1)
        return channels_first(sample)

    def windows(self, index: Tensor, uniforms: Tensor, crop: int) -> Batch:
        """Return a random crop of each sample without waiting for the device. All shapes are fixed."""
        sizes = self.sizes.index_select(0, index)
        corner = corners(uniforms, sizes, crop, self.scale)
        places: dict[int, Tensor] = {}  # flat index of each output pixel, by downsampling ratio
        batch = {}
        for name, every in self.samples.items():
            if every.ndim < 2:
                batch[name] = every.index_select(0, index)
                continue
            ratio = ratio_of(name, self.scale)
            side = crop // ratio
            if ratio not in places:
                rows, columns = (corner // ratio)[:, :, None].add(_counting(side, index.device)).unbind(1)
                start = self._offsets[ratio].index_select(0, index)[:, None, None]
                width = (sizes[:, 1] // ratio)[:, None, None]
                places[ratio] = (start + rows[:, :, None] * width + columns[:, None, :]).reshape(-1)
            channels = every.shape[-1]
            batch[name] = every.view(-1, channels).index_select(0, places[ratio]).view(len(index), side, side, channels)
        return channels_first(batch)


@lru_cache(maxsize=8)
def _counting(count: int, device: torch.device) -> Tensor:
    return torch.arange(count, device=device)


def _offsets(sizes: NDArray[np.int64], ratio: int) -> NDArray[np.int64]:
    """Return the offset of each image in the concatenated pixels, and the end of the last image."""
    return np.concatenate([[0], np.cumsum((sizes // ratio).prod(axis=1))]).astype(np.int64)
