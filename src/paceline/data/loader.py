"""The loader contract: tickets in, raw batches on the device out.

A loader is a pure function of tickets. What it yields is what the source holds (uint8 pictures,
integer labels) plus the tickets' own columns; transforms.py does the rest, on the device, in batches.
So every loader gives the same batches.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import ClassVar

import torch

from paceline.config.settings import RunSettings
from paceline.contracts.recipe import Batch
from paceline.data.crop import check_crop
from paceline.data.source import Source, sizes_of
from paceline.data.tickets import Tickets


class Loader:
    """Subclass it in a file of its own in `loaders/`: the file's name is the loader's name."""

    # What others need to know of a loader. Nobody compares with its name.
    description: ClassVar[str] = ""  # how it loads, in a few words
    package: ClassVar[str] = ""  # the module that must be installed besides torch

    def __init__(self, source: Source, device: torch.device, settings: RunSettings, crop: int = 0) -> None:
        """With a crop every picture gives the window that its ticket names; without, batches must be of one size."""
        self.source, self.device, self.settings, self.crop = source, device, settings, crop
        if crop:
            check_crop(sizes_of(source), crop, source.spec.scale, source.name_of)

    def load(self, requests: Iterable[Tickets]) -> Iterator[Batch]:
        """One raw batch per request, in order: pictures uint8 [n, c, h, w], "index" int64 [n], "uniforms" [n, k]."""
        return map(self.finish, self.fetch(requests))

    def fetch(self, requests: Iterable[Tickets]) -> Iterator[Batch]:
        """What has to come to the device for each request, in order; `finish` makes the raw batch of it."""
        raise NotImplementedError

    def finish(self, fetched: Batch) -> Batch:
        """The part of loading that runs on the device alone, and so can be part of a captured step."""
        return fetched

    def close(self) -> None:
        """Ends what the loader started."""


def are_pictures(tensor: torch.Tensor) -> bool:
    """Whether a field of a raw batch holds pictures, rather than numbers."""
    return tensor.dtype == torch.uint8 and tensor.ndim == 4
