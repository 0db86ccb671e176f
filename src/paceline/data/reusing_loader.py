"""Base class for loaders that reuse their worker processes or pipelines."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Generator, Iterable, Iterator
from typing import Generic, TypeVar
from weakref import WeakSet

import torch

from paceline.config.settings import RunSettings
from paceline.contracts.recipe import Batch
from paceline.data.loader import Loader
from paceline.data.source import Source
from paceline.data.tickets import Tickets

Reader = TypeVar("Reader")
Batches = Generator[Batch, None, None]


class ReusingLoader(Loader, Generic[Reader]):
    """Keeps track of open iterators, and of idle workers or pipelines, which the next evaluation reuses."""

    def __init__(
        self,
        source: Source,
        device: torch.device,
        settings: RunSettings,
        crop: int = 0,
        home: torch.device | None = None,
    ) -> None:
        super().__init__(source, device, settings, crop, home)
        self._open: WeakSet[Batches] = WeakSet()
        self._idle: list[Reader] = []

    def fetch(self, requests: Iterable[Tickets]) -> Iterator[Batch]:
        batches = self._batches(iter(requests))
        self._open.add(batches)
        return batches

    def close(self) -> None:
        for batches in list(self._open):
            batches.close()
        self._idle.clear()

    @abstractmethod
    def _batches(self, requests: Iterator[Tickets]) -> Batches:
        """Yield the batch for each request."""
