"""Loads batches with worker processes; each worker reads whole batches."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from paceline.contracts.recipe import Batch
from paceline.data.loader import Batches, ReusingLoader
from paceline.data.stream import Tickets, channels_first
from paceline.data.worker_pool import WorkerPool


class Workers(ReusingLoader[WorkerPool]):
    """Prefetches batches in `workers` processes; with 0 workers, this process reads them."""

    description = "decodes in worker processes"
    uses_workers = True
    auto_order = 100  # tried after every loader that keeps samples in memory

    def _batches(self, requests: Iterator[Tickets]) -> Batches:
        on_cuda = self.device.type == "cuda"
        pool = self._idle.pop() if self._idle else self._start_pool(pin_memory=on_cuda)
        batches = map(channels_first, pool.read(requests))
        yield from _one_ahead(batches, self.device) if on_cuda else batches
        self._idle.append(pool)

    def _start_pool(self, pin_memory: bool) -> WorkerPool:
        return WorkerPool(self.source, self.settings.workers, self.crop, pin_memory=pin_memory)


def _one_ahead(batches: Iterator[Batch], device: torch.device) -> Iterator[Batch]:
    """Yield batches on the device. A separate CUDA stream copies each batch while the previous one is in use."""
    copying = torch.cuda.Stream(device)  # type: ignore[no-untyped-call, unused-ignore]
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
    """Return a batch after making the caller's CUDA stream wait for its copy. The host does not wait."""
    device = batch["index"].device
    using = torch.cuda.current_stream(device)
    using.wait_event(copied)
    for tensor in batch.values():
        tensor.record_stream(using)
    return batch
