"""The base class for loaders, which turn tickets into raw batches on the device.

A ticket is a sample index plus the sample's random numbers. A loader is a pure function of tickets, so all loaders
produce the same batches. It yields the source's data (images, integer labels) together with the tickets' random
numbers. transforms.py then augments and normalises each batch on the device.
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
    """Whether a loader can load a source on a device."""

    ok: bool
    reason: str = ""
    home: torch.device | None = None  # device on which the loader keeps all samples; None if it keeps none


class Loader:
    """Turns tickets (sample indices and random numbers) into batches.

    Subclass it in a separate file, whose name is the name of the loader. Implement `fetch` and, for work that can run
    on the device, `finish`. A loader is a pure function of tickets, so all loaders return equal batches.

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

    # Properties of a loader. Other code checks these, never the name of the loader.
    description: ClassVar[str] = ""
    """A short description of how the loader works."""
    package: ClassVar[str] = ""
    """The Python package that the loader needs in addition to torch, if any."""
    uses_workers: ClassVar[bool] = False
    """Whether `--workers` sets how many processes or threads the loader uses."""
    extra: ClassVar[str] = ""
    """The Paceline extra that installs `package`."""
    auto_order: ClassVar[int | None] = None
    """The loader's position among those that `--loader auto` tries; None if `auto` does not try this loader."""

    @classmethod
    def fits(cls, source: Source, device: torch.device, budget: Budget) -> Fit:
        """Return whether this loader can load the source on the device.

        A loader that keeps samples in memory reserves space for them in the memory budget.
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
            source: The source to read samples from.
            device: The device to put the batches on.
            settings: The settings of the run.
            crop: The size in pixels of the square crop taken from each image; 0 loads whole images, which must have
                the same size within a batch.
            home: The device on which `fits` found room for the samples; by default, `device`.
        """
        self.source, self.device, self.settings, self.crop = source, device, settings, crop
        self.home = home or device
        if crop:
            check_crop(sizes_of(source), crop, source.spec.scale, source.name_of)

    @property
    def batches_ahead(self) -> int:
        """The number of batches to prefetch."""
        return 0

    def fetch(self, requests: Iterable[Tickets]) -> Iterator[Batch]:
        """Yield one batch of data per request on the device, in order.

        `finish` turns each of these batches into a raw batch.
        """
        raise NotImplementedError

    def finish(self, fetched: Batch) -> Batch:
        """Turn data that `fetch` yielded into a raw batch.

        A raw batch contains [n, c, h, w] images with the source's pixels, labels of shape [n], "index" (int64 [n]) and
        "uniforms" ([n, k]). This method runs only on the device, so it can be captured in a CUDA graph.
        """
        return fetched

    def close(self) -> None:
        """Stop the loader's processes and release its memory."""
