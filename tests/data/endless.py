"""Endless requests for batches, as during training."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from paceline.data.source import Source
from paceline.data.stream import Stream, Tickets


def endless(source: Source, batch: int, seed: int = 3) -> Iterator[Tickets]:
    """Yield the tickets of each batch."""
    stream = Stream(seed=seed, length=len(source))
    for start in itertools.count(0, batch):
        yield stream.take(start, start + batch)
