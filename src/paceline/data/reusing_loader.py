"""What loaders have in common that read through processes or pipelines and use these again."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator
from typing import Any
from weakref import WeakSet

import torch

from paceline.config.settings import RunSettings
from paceline.contracts.recipe import Batch
from paceline.data.loader import Loader
from paceline.data.source import Source
from paceline.data.tickets import Tickets


class ReusingLoader(Loader):
    """Knows the rows of batches that are still open, and what is idle: an evaluation takes it up again."""

    def __init__(self, source: Source, device: torch.device, settings: RunSettings, crop: int = 0) -> None:
        super().__init__(source, device, settings, crop)
        self._open: WeakSet[Iterator[Batch]] = WeakSet()
        self._idle: list[Any] = []

    def fetch(self, requests: Iterable[Tickets]) -> Iterator[Batch]:
        batches = self._batches(iter(requests))
        self._open.add(batches)
        return batches

    def close(self) -> None:
        for batches in list(self._open):
            batches.close()  # type: ignore[attr-defined]
        self._idle.clear()

    @abstractmethod
    def _batches(self, requests: Iterator[Tickets]) -> Iterator[Batch]:
        """The batches of one row of requests, from a generator."""
