"""Loaders turn tickets into raw batches on the device; feeds yield the batches for training and evaluation."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Generator, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar
from weakref import WeakSet

import torch

from paceline.config.settings import RunSettings
from paceline.contracts.recipe import Batch
from paceline.core.errors import UserError
from paceline.core.host import free_host_bytes
from paceline.core.registry import load_class, load_classes
from paceline.data.source import Source, bytes_needed, has_one_size, sizes_of
from paceline.data.stream import (
    Augment,
    Drawer,
    Stream,
    Tickets,
    check_crop,
    in_order,
    in_order_with_crops,
    part,
    transform,
)

SHARES = {"cuda": 0.6, "cpu": 0.25}  # fraction of free memory for samples, by device type; the model uses the rest


def free_bytes(device: torch.device) -> int:
    """Return the free memory of a CUDA device, or of the host for any other device."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else free_host_bytes()


class Budget:
    """The memory budget for samples: a fraction of the memory that is free at the start, shared by all sources."""

    def __init__(self, processes: int = 1, free: Mapping[str, int] = MappingProxyType({})) -> None:
        self.processes = processes  # number of processes that share host memory; each has its own GPU
        self.free = free  # free bytes by type of device, if they are not those of this machine
        self._left: dict[str, int] = {}

    def take(self, source: Source, device: torch.device) -> tuple[bool, str]:
        """Reserve memory for a source if enough of the budget is left; return whether it is, and an explanation."""
        kind = device.type
        if kind not in self._left:
            free = self.free[kind] if kind in self.free else free_bytes(device)
            self._left[kind] = int(free * SHARES[kind] / (self.processes if kind == "cpu" else 1))
        needed, left = bytes_needed(source), self._left[kind]
        fits = needed <= left
        self._left[kind] -= needed if fits else 0
        memory = f"{_describe_size(left)} of {'GPU' if kind == 'cuda' else 'host'} memory"
        return fits, f"{_describe_size(needed)} of samples {'fit' if fits else 'do not fit'} in {memory}"


def _describe_size(num_bytes: int) -> str:
    value, unit = (num_bytes / 1e9, "GB") if num_bytes >= 1e9 else (num_bytes / 1e6, "MB")
    return f"{value:,.0f} {unit}" if value >= 10 else f"{value:.2g} {unit}"


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
        advice = "use `paceline pack` to avoid decoding" if obstacles and not fit.home and source.decodes else ""
        reason = "; ".join(filter(None, [*obstacles, fit.reason, advice]))
        return Choice(name, reason or ("requested" if name == settings.loader else "automatic"), fit.home)
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


EVALUATION_BATCH = 500  # maximum samples per device and forward pass; does not affect the results
EVALUATION_PIXELS = 2**21  # maximum number of "image" pixels per batch; a single larger image is allowed
NUM_FIRST_BATCHES, LARGEST_FIRST_BATCH = 8, 64  # 512 samples, unless fewer fit in EVALUATION_PIXELS


class StepData(NamedTuple):
    """The data for one training step on this rank."""

    images: int  # number of images seen before this step
    fetched: list[list[Batch]]  # micro-batches for each repetition of a phase, as returned by `fetch`


class Cut(NamedTuple):
    """How a global batch is split: first into micro-batches, then each micro-batch across the ranks.

    This order gives each micro-batch the same samples at every world size.
    """

    batch_size: int
    accumulate: int
    rank: int
    size: int

    def parts(self, start: int) -> list[tuple[int, int]]:
        """Return this rank's positions [low, high) in each micro-batch of the global batch that begins at `start`."""
        whole = (start, start + self.batch_size)
        micro = [part(*whole, number, self.accumulate) for number in range(self.accumulate)]
        return [part(*range_, self.rank, self.size) for range_ in micro]


class TrainingFeed:
    """Yields the data for training steps from the endless stream of samples, starting at any position."""

    def __init__(self, pipeline: BatchPipeline, stream: Stream, cut: Cut, repeats: int, drawer: Drawer) -> None:
        self.pipeline, self.stream, self.cut = pipeline, stream, cut
        self.repeats, self.drawer = repeats, drawer

    @property
    def images_per_step(self) -> int:
        """Number of images that a step uses across all ranks and repetitions."""
        return self.cut.batch_size * self.repeats

    def steps(self, images: int, until: int) -> Iterator[StepData]:
        """Yield steps, starting after `images` images, until at least `until` images have been seen."""
        arriving = self.pipeline.fetch(self._requests(images, until))
        while images < until:
            fetched = []
            for start in self._starts(images):
                draws = self.drawer.table(start, self.cut.batch_size)
                micro_batches = []
                for low, high in self.cut.parts(start):
                    own = {name: table[low - start : high - start] for name, table in draws.items()}
                    micro_batches.append(next(arriving) | own)
                fetched.append(micro_batches)
            yield StepData(images, fetched)
            images += self.images_per_step

    def first_batches(self) -> list[Batch]:
        """Return the first samples in batches, before `finish`: the same on every rank and for every batch size."""
        size = min(LARGEST_FIRST_BATCH, _evaluation_batch(self.pipeline.loader))
        starts = range(0, NUM_FIRST_BATCHES * size, size)
        arriving = self.pipeline.fetch(self.stream.take(start, start + size) for start in starts)
        return [fetched | self.drawer.table(start, size) for start, fetched in zip(starts, arriving, strict=True)]

    def _starts(self, images: int) -> range:
        return range(images, images + self.images_per_step, self.cut.batch_size)

    def _requests(self, images: int, until: int) -> Iterator[Tickets]:
        while images < until:
            for start in self._starts(images):
                for low, high in self.cut.parts(start):
                    yield self.stream.take(low, high)
            images += self.images_per_step


def evaluation_batches(pipeline: BatchPipeline, rank: int, size: int, drawer: Drawer | None = None) -> Iterator[Batch]:
    """Yield each sample in this rank's part of a source once, in batches.

    The random inputs of a sample, and the place of its crop, depend only on its position. The last batch may be
    smaller. If image sizes differ, each batch contains one image.
    """
    loader, count = pipeline.loader, len(pipeline.loader.source)
    ranges = list(_ranges(count, rank, size, _evaluation_batch(loader)))
    requests = (in_order_with_crops(*range_, count) if loader.crop else in_order(*range_) for range_ in ranges)
    for range_, batch in zip(ranges, pipeline.batches(requests), strict=True):
        yield batch | (drawer.rows("evaluation", *range_) if drawer else {})


def drawn_batches(drawer: Drawer, count: int, rank: int, size: int) -> Iterator[Batch]:
    """Yield this rank's part of `count` rows of random inputs, in batches. A row depends only on its position."""
    device = drawer.generator.device
    for start, stop in _ranges(count, rank, size):
        yield drawer.rows("evaluation", start, stop) | {"index": torch.arange(start, stop, device=device)}


def _evaluation_batch(loader: Loader) -> int:
    if loader.crop:
        height = width = loader.crop
    elif has_one_size(loader.source):
        height, width = sizes_of(loader.source)[0].tolist()
    else:
        return 1
    return max(1, min(EVALUATION_BATCH, EVALUATION_PIXELS // (height * width)))


def _ranges(count: int, rank: int, size: int, batch: int = EVALUATION_BATCH) -> Iterator[tuple[int, int]]:
    low, high = part(0, count, rank, size)
    return ((start, min(start + batch, high)) for start in range(low, high, batch))
