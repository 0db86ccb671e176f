"""Loaders turn tickets into raw batches on the device; the source and the device decide which one is used."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Generator, Iterable, Iterator, Mapping
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar
from weakref import WeakSet

import torch

from paceline.config.settings import RunSettings
from paceline.contracts.recipe import Batch
from paceline.core.errors import UserError
from paceline.core.registry import load_class, load_classes
from paceline.data.source import Source, sizes_of
from paceline.data.stream import Tickets, check_crop
from paceline.data.whole_source import Budget


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


AUTO = "auto"


class Choice(NamedTuple):
    """The name of a loader, why it was chosen, and the device that will store all samples, if any."""

    name: str
    reason: str
    home: torch.device | None = None

    def build(self, source: Source, device: torch.device, settings: RunSettings, crop: int = 0) -> Loader:
        """Construct the loader."""
        return load_class("loader", self.name, Loader)(source, device, settings, crop, self.home)


def choose_loader(settings: RunSettings, source: Source, device: torch.device, budget: Budget | None = None) -> Choice:
    """Return the loader in the settings or, if it is "auto" or not suitable, the first suitable loader."""
    budget = budget or Budget(settings.devices)
    obstacles: list[str] = []
    for name in _candidates(settings.loader):
        fit = load_class("loader", name, Loader).fits(source, device, budget)
        if not fit.ok:
            obstacles.append(fit.reason)
            continue
        advice = ["use `paceline pack` to avoid decoding"] if obstacles and not fit.home and source.decodes else []
        reasons = [*obstacles, *([fit.reason] if fit.reason else []), *advice]
        return Choice(name, "; ".join(reasons) or ("requested" if name == settings.loader else "automatic"), fit.home)
    raise UserError(f"--loader {settings.loader}: no loader can load this data: {'; '.join(obstacles)}")


def choose_loaders(
    settings: RunSettings, sources: Mapping[str, Source], device: torch.device
) -> tuple[dict[str, Choice], list[str]]:
    """Choose a loader for each split, training first, within one memory budget; also return lines to print."""
    budget = Budget(settings.devices)
    order = sorted(sources, key=lambda split: split != "train")
    choices = {split: choose_loader(settings, sources[split], device, budget) for split in order}
    first = choices[order[0]]
    lines = [f"loader {first.name}: {first.reason}"]
    for split, choice in choices.items():
        if (choice.name, choice.home) != (first.name, first.home):
            lines.append(f"loader {choice.name} for {split}: {choice.reason}")
    return choices, lines


def _candidates(wanted: str) -> Iterator[str]:
    """Yield the names of the loaders to try: the one in the settings, then those that "auto" tries, in order."""
    if wanted != AUTO:
        yield wanted
    orders = {name: loader.auto_order for name, loader in load_classes("loader", Loader).items() if name != wanted}
    yield from sorted((name for name, order in orders.items() if order is not None), key=lambda name: orders[name] or 0)


Reader = TypeVar("Reader")
Batches = Generator[Batch, None, None]


class ReusingLoader(Loader, Generic[Reader]):
    """Keeps track of open iterators, and of idle workers or pipelines, which the next evaluation reuses."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
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
