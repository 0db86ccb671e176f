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
    reason: str = ""
    home: torch.device | None = None  # device on which the loader keeps all samples; None if it keeps none


class Loader:
    """Turns tickets into batches. Subclass it in a file of its own.

    The file's name is the loader's name. Implement `fetch` and, for what can run on the device, `finish`. A loader is
    a pure function of tickets: all loaders give equal batches.

    Examples:
        ```python
        # my_loader.py
        import torch

        from paceline import Loader


        class MyLoader(Loader):
            description = "reads in the training process"

            def fetch(self, requests):
                for tickets in requests:
                    samples = self.source.read_many(tickets.index)
                    batch = {name: torch.from_numpy(array) for name, array in samples.items()}
                    batch["image"] = batch["image"].permute(0, 3, 1, 2)  # uint8 [n, c, h, w]
                    batch |= {"index": torch.from_numpy(tickets.index), "uniforms": torch.from_numpy(tickets.uniforms)}
                    yield {name: tensor.to(self.device) for name, tensor in batch.items()}
        ```

        >>> result = paceline.train("./my_recipe.py", loader="./my_loader.py", images=512, out="runs/loaded")
        >>> result.images
        512
    """

    # What others need to know of a loader. Nobody compares with its name.
    description: ClassVar[str] = ""
    """How it loads, in a few words."""
    package: ClassVar[str] = ""
    """The module that must be installed besides torch."""
    uses_workers: ClassVar[bool] = False
    """Whether `--workers` counts its processes or threads."""
    extra: ClassVar[str] = ""
    """The extra of Paceline that installs `package`."""
    auto_order: ClassVar[int | None] = None
    """Its position among those that `--loader auto` tries; None: not tried."""

    @classmethod
    def fits(cls, source: Source, device: torch.device, budget: Budget) -> Fit:
        """Return whether it can serve the source.

        A loader that keeps samples in memory takes them from the budget.
        """
        return Fit(True)

    def __init__(
        self,
        source: Source,
        device: torch.device,
        settings: RunSettings,
        crop: int = 0,
        home: torch.device | None = None,
    ) -> None:
        """Open the loader.

        Args:
            source: Where samples are read from.
            device: Where batches go.
            settings: The run's settings.
            crop: Side in pixels of the window that each ticket selects; 0 gives whole images, of one size per batch.
            home: Where `fits` found room for the samples; the device itself by default.
        """
        self.source, self.device, self.settings, self.crop = source, device, settings, crop
        self.home = home or device
        if crop:
            check_crop(sizes_of(source), crop, source.spec.scale, source.name_of)

    @property
    def batches_ahead(self) -> int:
        """How many batches it may read before they are requested."""
        return 0

    def fetch(self, requests: Iterable[Tickets]) -> Iterator[Batch]:
        """Yield the data for each request on the device, in order.

        `finish` turns it into a raw batch.
        """
        raise NotImplementedError

    def finish(self, fetched: Batch) -> Batch:
        """Return the raw batch of what `fetch` yielded.

        It has images uint8 [n, c, h, w], numbers [n], "index" int64 [n] and "uniforms" [n, k]. This runs on the device
        alone, and so can be part of a captured step.
        """
        return fetched

    def close(self) -> None:
        """Stop the loader's processes and release its memory."""
