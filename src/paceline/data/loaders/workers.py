"""Loads with worker processes, each of which reads whole batches."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable, Iterator
from functools import partial
from weakref import WeakSet

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from paceline.config import RunSettings
from paceline.data.crop import windows
from paceline.data.loader import Loader
from paceline.data.loaders._transfer import channels_first, upload
from paceline.data.source import Sample, Source, sizes_of
from paceline.data.tickets import Tickets
from paceline.errors import UserError
from paceline.processes import die_with_parent
from paceline.recipe import Batch


class Workers(Loader):
    """Reads ahead in `workers` processes; with 0 of them it reads in this one."""

    def __init__(self, source: Source, device: torch.device, settings: RunSettings, crop: int = 0) -> None:
        super().__init__(source, device, settings, crop)
        self._open: WeakSet[Iterator[Batch]] = WeakSet()

    def fetch(self, requests: Iterable[Tickets]) -> Iterator[Batch]:
        batches = self._batches(requests)
        self._open.add(batches)
        return batches

    def close(self) -> None:
        for batches in list(self._open):
            batches.close()  # type: ignore[attr-defined]

    def _batches(self, requests: Iterable[Tickets]) -> Iterator[Batch]:
        num_workers, on_cuda = self.settings.workers, self.device.type == "cuda"
        read = DataLoader(
            _Reading(self.source, self.crop),
            batch_size=None,
            sampler=requests,
            num_workers=num_workers,
            pin_memory=on_cuda,
            multiprocessing_context="fork" if num_workers else None,
            worker_init_fn=partial(_begin_worker, os.getpid()),
            generator=torch.Generator(),  # else the global one is advanced, and this loader changes the run
        )
        batches = _unwrap(read)
        yield from _one_ahead(batches, self.device) if on_cuda else (upload(batch, self.device) for batch in batches)


class _Reading(Dataset):
    """The batch of a request, or the UserError that it met: a worker's exceptions lose their one line on the way."""

    def __init__(self, source: Source, crop: int) -> None:
        self.source, self.crop = source, crop
        self.sizes = sizes_of(source)

    def __getitem__(self, request: Tickets) -> Batch | UserError:
        try:
            samples = self._windows(request) if self.crop else self.source.read_many(request.index)
        except UserError as error:
            return error
        arrays = samples | request._asdict()
        return {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in arrays.items()}

    def _windows(self, request: Tickets) -> Sample:
        found = windows(request.uniforms, self.sizes[request.index], self.crop, self.source.facts.scale)
        samples = [
            self.source.read_window(int(index), window) for index, window in zip(request.index, found, strict=True)
        ]
        return {name: np.stack([sample[name] for sample in samples]) for name in samples[0]}


def _begin_worker(parent: int, worker: int) -> None:
    die_with_parent(parent)
    torch.set_num_threads(1)
    # Signals to the whole job are for the trainer, which still needs its workers while it comes to an orderly end.
    os.setpgid(0, 0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _unwrap(results: Iterable[Batch | UserError]) -> Iterator[Batch]:
    for result in results:
        if isinstance(result, UserError):
            raise result
        yield channels_first(result)


def _one_ahead(batches: Iterator[Batch], device: torch.device) -> Iterator[Batch]:
    """The batches on the device, each copied on a stream of its own while the one before it is used."""
    copying = torch.cuda.Stream(device)
    ahead: tuple[Batch, torch.cuda.Event] | None = None
    for batch in batches:
        before = ahead
        with torch.cuda.stream(copying):
            copied = {name: tensor.to(device, non_blocking=True) for name, tensor in batch.items()}
            ahead = copied, copying.record_event()
        if before is not None:
            yield _hand_over(*before)
    if ahead is not None:
        yield _hand_over(*ahead)


def _hand_over(batch: Batch, copied: torch.cuda.Event) -> Batch:
    """The batch, safe to use on the caller's stream, which waits for the copy; the host does not."""
    device = batch["index"].device
    using = torch.cuda.current_stream(device)
    using.wait_event(copied)
    for tensor in batch.values():
        tensor.record_stream(using)
    return batch
