"""The loader contract: tickets in, raw batches on the device out.

A loader is a pure function of tickets. It yields the source's data (uint8 images, integer labels) together with the
tickets' own columns. transforms.py does the rest on the device, one batch at a time. So all loaders produce the same
batches.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import ClassVar, NamedTuple

import torch

from paceline.config.settings import RunSettings
from paceline.contracts.recipe import Batch
from paceline.data.crop import check_crop
from paceline.data.memory import Budget
from paceline.data.source import Source, sizes_of
from paceline.data.tickets import Tickets


class Fit(NamedTuple):
    """Whether a loader can serve a source on a device."""

    ok: bool
    why: str = ""
    home: torch.device | None = None  # device on which the loader keeps all samples; None if it keeps none


class Loader:
    """Base class. Put each subclass in its own file in `loaders/`, named after the loader."""

    # Other code reads these attributes; it never checks a loader's name.
    description: ClassVar[str] = ""  # how it loads, in a few words
    package: ClassVar[str] = ""  # module that must be installed in addition to torch
    uses_workers: ClassVar[bool] = False  # whether `--workers` sets the number of its processes or threads
    extra: ClassVar[str] = ""  # pip extra that installs this module
    auto_order: ClassVar[int | None] = None  # `--loader auto` tries loaders in this order; None: never tried

    @classmethod
    def fits(cls, source: Source, device: torch.device, budget: Budget) -> Fit:
        """Return whether the loader can serve the source; reserve memory in the budget if it keeps all samples."""
        return Fit(True)

    def __init__(
        self,
        source: Source,
        device: torch.device,
        settings: RunSettings,
        crop: int = 0,
        home: torch.device | None = None,
    ) -> None:
        """With a crop, the ticket decides the window of each image. Without one, a batch needs images of one size.

        `home` is the device on which `fits` found room for the samples; by default it is `device`.
        """
        self.source, self.device, self.settings, self.crop = source, device, settings, crop
        self.home = home or device
        if crop:
            check_crop(sizes_of(source), crop, source.spec.scale, source.name_of)

    @property
    def batches_ahead(self) -> int:
        """Maximum number of batches that are prefetched."""
        return 0

    def fetch(self, requests: Iterable[Tickets]) -> Iterator[Batch]:
        """Yield the data for each request on the device, in order; `finish` turns it into a raw batch."""
        raise NotImplementedError

    def finish(self, fetched: Batch) -> Batch:
        """Return the raw batch: uint8 images [n, c, h, w], numbers [n], int64 "index" [n] and "uniforms" [n, k].

        This runs entirely on the device, so it can be captured in a CUDA graph.
        """
        return fetched

    def close(self) -> None:
        """Stop the loader's processes and release its memory."""
