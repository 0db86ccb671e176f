"""The loader contract: tickets in, raw batches on the device out.

A loader is a pure function of tickets. What it yields is what the source holds (uint8 images, integer labels) plus the
tickets' own columns; transforms.py does the rest, on the device, in batches. So every loader gives the same batches.
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
    reason: str = ""
    home: torch.device | None = None  # where the loader keeps all samples; None where it keeps none


class Loader:
    """Subclass it in a file of its own in `loaders/`: the file's name is the loader's name."""

    # What others need to know of a loader. Nobody compares with its name.
    description: ClassVar[str] = ""  # how it loads, in a few words
    package: ClassVar[str] = ""  # the module that must be installed besides torch
    uses_workers: ClassVar[bool] = False  # `--workers` counts its processes or threads
    extra: ClassVar[str] = ""  # of paceline, which installs that module
    auto_order: ClassVar[int | None] = None  # its position among those that `--loader auto` tries; None: not tried

    @classmethod
    def fits(cls, source: Source, device: torch.device, budget: Budget) -> Fit:
        """Return whether it can serve the source; a loader that keeps samples in memory takes them from the budget."""
        return Fit(True)

    def __init__(
        self,
        source: Source,
        device: torch.device,
        settings: RunSettings,
        crop: int = 0,
        home: torch.device | None = None,
    ) -> None:
        """With a crop every image gives the window that its ticket names; without, a batch must be of one size.

        `home` is where `fits` found room for the samples; the device itself by default.
        """
        self.source, self.device, self.settings, self.crop = source, device, settings, crop
        self.home = home or device
        if crop:
            check_crop(sizes_of(source), crop, source.spec.scale, source.name_of)

    @property
    def batches_ahead(self) -> int:
        """How many batches it may have read before they are requested."""
        return 0

    def fetch(self, requests: Iterable[Tickets]) -> Iterator[Batch]:
        """Yield what has to come to the device for each request, in order; `finish` makes the raw batch of it."""
        raise NotImplementedError

    def finish(self, fetched: Batch) -> Batch:
        """Return the raw batch: images uint8 [n, c, h, w], numbers [n], "index" int64 [n], "uniforms" [n, k].

        This runs on the device alone, and so can be part of a captured step.
        """
        return fetched

    def close(self) -> None:
        """End what the loader started."""
