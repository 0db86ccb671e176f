"""Loads with worker processes, each of which reads whole batches."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterable, Iterator
from functools import partial
from types import TracebackType

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from paceline.config.settings import RunSettings
from paceline.contracts.recipe import Batch
from paceline.core.errors import UserError
from paceline.core.heartbeat import die_with_parent
from paceline.data.crop import windows
from paceline.data.reusing_loader import ReusingLoader
from paceline.data.source import Sample, Source, sizes_of
from paceline.data.tickets import Tickets
from paceline.data.transfer import channels_first, upload

BATCHES_PER_WORKER = 2  # that are read ahead


class Workers(ReusingLoader):
    """Reads ahead in `workers` processes; with 0 of them it reads in this one."""

    description = "processes that decode"

    def _batches(self, requests: Iterator[Tickets]) -> Iterator[Batch]:
        on_cuda = self.device.type == "cuda"
        pool = self._idle.pop() if self._idle else _Pool(_Reading(self.source, self.crop), self.settings, on_cuda)
        batches = _unwrap(pool.read(requests))
        yield from _one_ahead(batches, self.device) if on_cuda else (upload(batch, self.device) for batch in batches)
        self._idle.append(pool)


class _Pool:
    """Processes that read, for one row of requests after another."""

    def __init__(self, reading: _Reading, settings: RunSettings, pinned: bool) -> None:
        self.asked = _Asked()
        self.loader = DataLoader(
            reading,
            batch_size=None,
            sampler=self.asked,
            num_workers=settings.workers,
            prefetch_factor=BATCHES_PER_WORKER if settings.workers else None,
            persistent_workers=settings.workers > 0,
            pin_memory=pinned,
            multiprocessing_context="fork" if settings.workers else None,
            worker_init_fn=partial(_begin_worker, os.getpid()),
            generator=torch.Generator(),  # else the global one is advanced, and this loader changes the run
        )

    def read(self, requests: Iterable[Tickets]) -> Iterable[Batch | UserError]:
        """What was read for each request, in order."""
        self.asked.requests = requests
        return self.loader


class _Asked:
    """The requests that a pool has now; apart from it, so that no circle keeps the processes alive."""

    requests: Iterable[Tickets] = ()

    def __iter__(self) -> Iterator[Tickets]:
        return iter(self.requests)


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
        found = windows(request.uniforms, self.sizes[request.index], self.crop, self.source.spec.scale)
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
    sys.excepthook = _say_unless_left


def _say_unless_left(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Keeps silent where the process that was to be handed a batch has gone: that one says why it went."""
    if not issubclass(kind, (ConnectionError, EOFError)):
        sys.__excepthook__(kind, error, trace)


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
