"""Keeps the whole source in memory, with the pixels as stored: on the device if it fits, otherwise on the host."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import Any

import numpy as np
import torch

from paceline.contracts.recipe import Batch
from paceline.data.loader import Fit, Loader
from paceline.data.source import Source
from paceline.data.stream import Tickets, upload
from paceline.data.whole_source import Budget, Pixels, num_readers

CPU = torch.device("cpu")
REQUESTS_PER_UPLOAD = 64  # number of requests copied to the device together, since each is small
BATCHES_AHEAD = 2  # number of batches gathered on the host while the device works on another


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
        self.pixels: Pixels | None = Pixels(self.source, self.home, num_readers(self.settings))

    def fetch(self, requests: Iterable[Tickets]) -> Iterator[Batch]:
        if self._picks_on_device:
            return self._tickets(requests)
        return self._whole_images(requests) if self.home == self.device else self._pick_on_host(requests)

    def finish(self, fetched: Batch) -> Batch:
        return self._pick(fetched) if self._picks_on_device else fetched

    def close(self) -> None:
        self.pixels = None

    @property
    def _kept(self) -> Pixels:
        assert self.pixels is not None, "the loader is closed"
        return self.pixels

    @property
    def _picks_on_device(self) -> bool:
        """Whether batches are gathered on the device, which requires images of one size."""
        return self.home == self.device and bool(self.crop or self._kept.one_size)

    def _pick(self, tickets: Batch) -> Batch:
        if self.crop:
            return self._kept.windows(tickets["index"], tickets["uniforms"], self.crop) | tickets
        if self._kept.one_size:
            return self._kept.rows(tickets["index"]) | tickets
        (number,) = tickets["index"].tolist()
        return self._kept.whole(number) | tickets

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
            yield self._kept.whole(number) | upload(_concatenate([request]), self.device)

    def _pick_on_host(self, requests: Iterable[Tickets]) -> Iterator[Batch]:
        ahead: deque[Future[Batch]] = deque()
        with ThreadPoolExecutor(1) as thread:
            for request in requests:
                ahead.append(thread.submit(self._pick_pinned, request))
                if len(ahead) > BATCHES_AHEAD:
                    yield upload(ahead.popleft().result(), self.device)
            while ahead:
                yield upload(ahead.popleft().result(), self.device)

    def _pick_pinned(self, request: Tickets) -> Batch:
        picked = self._pick(_concatenate([request]))
        return {name: field.pin_memory() for name, field in picked.items()} if self.device.type == "cuda" else picked


def _concatenate(requests: list[Tickets]) -> Batch:
    columns = zip(*requests, strict=True)
    return {
        name: torch.from_numpy(np.concatenate(column)) for name, column in zip(Tickets._fields, columns, strict=True)
    }
