"""Whole sources in memory: their size, the memory that is free for them, and their pixels."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import closing
from functools import lru_cache
from types import MappingProxyType

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.config.settings import RunSettings
from paceline.contracts.recipe import Batch
from paceline.core.host import free_host_bytes
from paceline.core.ordered_map import num_cores
from paceline.core.terminal import Counter
from paceline.data.source import Source, has_one_size, sizes_of
from paceline.data.stream import IMAGE_TYPES, Tickets, channels_first, corners, in_order, stored
from paceline.data.worker_pool import BATCHES_PER_WORKER, WorkerPool

BYTES_WAITING = 256 * 2**20  # maximum size of the samples that worker processes have read ahead, for any number of them
MAX_READERS = 16
LARGE_BYTES_WAITING = 2**30  # the same for samples so large that a batch has only one; fewer processes read them


def bytes_needed(source: Source) -> int:
    """Return the size of all decoded samples in bytes."""
    fields = source.read(0)
    if source.sizes is None:
        return len(source) * sum(field.nbytes for field in fields.values())
    needed = 0
    for name, field in fields.items():
        ratio = max(1, source.spec.scale) if name == "low" else 1
        pixels = int((source.sizes // ratio).prod(axis=1).sum())
        needed += pixels * field.shape[-1] * field.itemsize if field.ndim == 3 else len(source) * field.nbytes
    return needed


def num_readers(settings: RunSettings) -> int:
    """Return how many processes or threads read files at the start of a run: this process's share of the cores.

    Training does not run yet, so `workers`, which must leave cores for training, is only the minimum. With `workers=0`,
    everything is read in this process.
    """
    if not settings.workers:
        return 0
    return max(settings.workers, min(MAX_READERS, num_cores() // max(1, settings.devices)))


def read_in_order(
    source: Source, num_workers: int, bytes_per_batch: int, start: int = 0
) -> Generator[Batch, None, None]:
    """Yield all samples from `start` on, in batches with images [n, h, w, c].

    If image sizes differ, each batch has one sample. Worker processes prefetch if samples have to be decoded; close the
    generator to stop them early. `bytes_per_batch` is reduced for many workers, and the number of workers for large
    samples, so that they do not need more memory.
    """
    num_workers = num_workers if source.decodes else 0
    needed = bytes_needed(source)
    if num_workers:
        num_workers = max(1, min(num_workers, LARGE_BYTES_WAITING // (BATCHES_PER_WORKER * _largest(source, needed))))
        bytes_per_batch = min(bytes_per_batch, BYTES_WAITING // (num_workers * BATCHES_PER_WORKER))
    pool = WorkerPool(source, num_workers)
    rows = max(1, bytes_per_batch * len(source) // needed) if has_one_size(source) else 1
    yield from pool.read(in_order(low, min(low + rows, len(source))) for low in range(start, len(source), rows))


def _largest(source: Source, needed: int) -> int:
    """Return the approximate size of the largest sample in bytes."""
    if source.sizes is None:
        return max(1, needed // len(source))
    pixels = source.sizes.prod(axis=1)
    return max(1, int(needed * (pixels.max() / pixels.sum())))


SHARES = {"cuda": 0.6, "cpu": 0.25}  # fraction of free memory for samples, by device type; the model uses the rest


def free_bytes(device: torch.device) -> int:
    """Return the free memory of a CUDA device, or of the host for any other device."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else free_host_bytes()


class Budget:
    """The memory budget for samples: a fraction of the memory that is free at the start, shared by all sources."""

    def __init__(self, processes: int = 1, free: Mapping[str, int] = MappingProxyType({})) -> None:
        self.processes = processes  # number of processes that share host memory; each has its own GPU
        self.free = free  # free bytes by type of device, if they are not those of this machine
        self._left: dict[str, int] = {}
        self._taken: set[str] = set()

    def take(self, source: Source, device: torch.device) -> tuple[bool, str]:
        """Reserve memory for a source if enough of the budget is left; return whether it is, and an explanation."""
        kind = device.type
        num_sharing = self.processes if kind == "cpu" else 1
        if kind not in self._left:
            free = self.free[kind] if kind in self.free else free_bytes(device)
            self._left[kind] = int(free * SHARES[kind] / num_sharing)
        needed, left = bytes_needed(source), self._left[kind]
        fits = needed <= left
        shared = f", shared by {num_sharing} processes" if num_sharing > 1 else ""
        reason = (
            f"{_size(needed)} of samples {'fit' if fits else 'do not fit'} in {_size(left)} "
            f"({'what remains of ' if kind in self._taken else ''}{SHARES[kind]:.0%} of the free "
            f"{'GPU' if kind == 'cuda' else 'host'} memory{shared})"
        )
        if fits:
            self._left[kind] -= needed
            self._taken.add(kind)
        return fits, reason


def _size(count: int) -> str:
    value, unit = (count / 1e9, "GB") if count >= 1e9 else (count / 1e6, "MB")
    return f"{value:,.0f} {unit}" if value >= 10 else f"{value:.2g} {unit}"


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
