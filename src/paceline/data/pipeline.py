"""A batch's way from tickets to a recipe, in two stages that every user of data shares.

`fetch` brings to the device what the device cannot compute by itself; it iterates, and may wait for files. `finish`
makes the recipe's batch of it: it runs on the device alone, in fixed shapes and without a wait, so that it can be part
of a captured step.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from paceline.contracts.recipe import Batch
from paceline.data.loader import Loader
from paceline.data.tickets import Tickets
from paceline.data.transforms import Augment, transform


class BatchPipeline:
    """A loader and what happens to its batches on the device; without `augment` nothing is changed at random."""

    def __init__(self, loader: Loader, augment: Augment | None, dtype: torch.dtype) -> None:
        self.loader, self.augment, self.dtype = loader, augment, dtype

    def fetch(self, requests: Iterable[Tickets]) -> Iterator[Batch]:
        """Yield what has to come to the device for each request, in order."""
        return self.loader.fetch(requests)

    def finish(self, fetched: Batch) -> Batch:
        """Return the batch that a recipe sees, computed on the device alone."""
        return transform(self.loader.finish(fetched), self.augment, self.dtype)

    def batches(self, requests: Iterable[Tickets]) -> Iterator[Batch]:
        """Yield the finished batch of each request, in order."""
        return map(self.finish, self.fetch(requests))
