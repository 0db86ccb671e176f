"""Keeps the whole source in memory as uint8, on the device where it fits, and picks batches out of it there."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice

import numpy as np
import torch

from paceline.config.settings import RunSettings
from paceline.contracts.recipe import Batch
from paceline.data.loader import Loader
from paceline.data.pixels import Pixels
from paceline.data.source import Source
from paceline.data.tickets import Tickets
from paceline.data.transfer import upload

REQUESTS_PER_UPLOAD = 64  # tickets are small: many go to the device at once
BATCHES_AHEAD = 2  # that are picked on the host while the device works on another


class Resident(Loader):
    """Reads every sample once, at the start; after that a batch costs one gather and no wait.

    Data that the device cannot hold stays in the host's memory: batches are picked there, ahead of the step.
    """

    description = "uint8 on the device"

    def __init__(
        self,
        source: Source,
        device: torch.device,
        settings: RunSettings,
        crop: int = 0,
        home: torch.device | None = None,
    ) -> None:
        """The data's home is the device if nothing else is said; whether it fits there is asked before."""
        super().__init__(source, device, settings, crop)
        self.home = home or device
        self.pixels: Pixels | None = Pixels(source, self.home, settings)

    def fetch(self, requests: Iterable[Tickets]) -> Iterator[Batch]:
        assert self.pixels is not None, "a closed loader gives nothing"
        if self._picks_on_the_device:
            return self._tickets(requests)
        return self._whole_pictures(requests) if self.home == self.device else self._picked_on_the_host(requests)

    @property
    def _picks_on_the_device(self) -> bool:
        """Whether tickets are enough there: all batches have one shape."""
        assert self.pixels is not None
        return self.home == self.device and bool(self.crop or self.pixels.one_size)

    def finish(self, fetched: Batch) -> Batch:
        return self._pick(fetched) if self._picks_on_the_device else fetched

    def close(self) -> None:
        self.pixels = None

    def _pick(self, tickets: Batch) -> Batch:
        assert self.pixels is not None
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
            for columns in zip(*(column.split(lengths) for column in tickets.values()), strict=True):
                yield dict(zip(tickets, columns, strict=True))

    def _whole_pictures(self, requests: Iterable[Tickets]) -> Iterator[Batch]:
        """Their shapes differ, so they are cut out here, where the host knows which one is asked for."""
        assert self.pixels is not None
        for request in requests:
            (number,) = request.index.tolist()
            yield self.pixels.whole(number) | upload(_concatenate([request]), self.device)

    def _picked_on_the_host(self, requests: Iterable[Tickets]) -> Iterator[Batch]:
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
