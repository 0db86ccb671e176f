"""Turns tickets (sample indices and random numbers) into batches for a recipe, in two stages.

`fetch` moves data to the device and may wait for files. `finish` turns this data into the batch for the recipe. It runs
entirely on the device, with fixed shapes and without waiting, so it can be captured in a CUDA graph. Training and
evaluation share this code.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from paceline.contracts.recipe import Batch
from paceline.data.loader import Loader
from paceline.data.tickets import Tickets
from paceline.data.transforms import Augment, transform


class BatchPipeline:
    """A loader plus the transforms applied to its batches on the device. Only `augment` adds randomness."""

    def __init__(self, loader: Loader, augment: Augment | None, dtype: torch.dtype) -> None:
        self.loader, self.augment, self.dtype = loader, augment, dtype
        self.pixels = loader.source.spec.pixel_format

    def fetch(self, requests: Iterable[Tickets]) -> Iterator[Batch]:
        """Yield the data for each request on the device, in order."""
        return self.loader.fetch(requests)

    def finish(self, fetched: Batch) -> Batch:
        """Return the batch for the recipe, computed entirely on the device."""
        return transform(self.loader.finish(fetched), self.augment, self.dtype, self.pixels)

    def batches(self, requests: Iterable[Tickets]) -> Iterator[Batch]:
        """Yield the finished batch for each request, in order."""
        return map(self.finish, self.fetch(requests))
