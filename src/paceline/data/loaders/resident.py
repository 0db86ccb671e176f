"""Keeps the whole source on the device as uint8 and picks batches out of it there."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path

import numpy as np
import torch

from paceline.config import RunSettings
from paceline.data.loader import Loader
from paceline.data.loaders._transfer import channels_first, channels_last, upload
from paceline.data.loaders.workers import Workers
from paceline.data.source import Source, lies_in_memory
from paceline.data.tickets import Tickets, in_order
from paceline.recipe import Batch

SHARE_OF_GPU_MEMORY = 0.6  # of what is free; the rest is for the model
SHARE_OF_HOST_MEMORY = 0.25
BYTES_PER_READ = 64 * 2**20
REQUESTS_PER_UPLOAD = 64  # tickets are small: many go to the device at once


class Resident(Loader):
    """Reads every sample once, at the start; after that a batch costs one gather and no wait."""

    def __init__(self, source: Source, device: torch.device, settings: RunSettings) -> None:
        super().__init__(source, device, settings)
        self.samples = _read_all(source, device, settings)

    def fetch(self, requests: Iterable[Tickets]) -> Iterator[Batch]:
        requests = iter(requests)
        while together := list(islice(requests, REQUESTS_PER_UPLOAD)):
            tickets = upload(_concatenate(together), self.device)
            stop = 0
            for request in together:
                start, stop = stop, stop + len(request.index)
                yield {name: column[start:stop] for name, column in tickets.items()}

    def finish(self, fetched: Batch) -> Batch:
        picked = {name: every.index_select(0, fetched["index"]) for name, every in self.samples.items()}
        return channels_first(picked) | fetched

    def close(self) -> None:
        self.samples = {}


def _concatenate(requests: list[Tickets]) -> Batch:
    columns = zip(*requests, strict=True)
    return {
        name: torch.from_numpy(np.concatenate(column)) for name, column in zip(Tickets._fields, columns, strict=True)
    }


def fits(source: Source, device: torch.device, sharers: int = 1) -> tuple[bool, str]:
    """Whether the source can stay on the device beside a model, and why; `sharers` processes share its memory."""
    needed = len(source) * _bytes_per_sample(source)
    on_cuda = device.type == "cuda"
    share = SHARE_OF_GPU_MEMORY if on_cuda else SHARE_OF_HOST_MEMORY
    free = torch.cuda.mem_get_info(device)[0] if on_cuda else _free_host_memory()
    allowed = int(free * share / sharers)
    verdict = "fit" if needed <= allowed else "do not fit"
    return needed <= allowed, (
        f"{_gigabytes(needed)} of samples {verdict} in {_gigabytes(allowed)} "
        f"({share:.0%} of the free {'GPU' if on_cuda else 'host'} memory{f', for {sharers}' if sharers > 1 else ''})"
    )


def _read_all(source: Source, device: torch.device, settings: RunSettings) -> Batch:
    """Every sample of the source on the device, read in pieces so that the host never holds them all twice."""
    if lies_in_memory(source):
        settings = dataclasses.replace(settings, workers=0)  # nothing to decode: processes would only cost
    rows = max(1, BYTES_PER_READ // _bytes_per_sample(source))
    starts = range(0, len(source), rows)
    reader = Workers(source, torch.device("cpu"), settings)
    samples: Batch = {}
    pieces = reader.load(in_order(start, min(start + rows, len(source))) for start in starts)
    for start, piece in zip(starts, pieces, strict=True):
        for name, field in channels_last(piece).items():
            if name in Tickets._fields:
                continue
            if name not in samples:
                samples[name] = torch.empty((len(source), *field.shape[1:]), dtype=field.dtype, device=device)
            samples[name][start : start + len(field)] = field
    return samples


def _bytes_per_sample(source: Source) -> int:
    return sum(array.nbytes for array in source.read(0).values())


def _free_host_memory() -> int:
    """Bytes that this process could still take: the machine's, or its container's where that is less."""
    lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    available = int(lines["MemAvailable"].split()[0]) * 1024
    limit = Path("/sys/fs/cgroup/memory.max")
    text = limit.read_text().strip() if limit.is_file() else "max"
    return available if text == "max" else min(available, int(text))


def _gigabytes(count: float) -> str:
    return f"{count / 1e9:.2g} GB"
