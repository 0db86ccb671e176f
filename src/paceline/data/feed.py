"""Yields training batches from any position in the data stream, and evaluation batches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch

from paceline.contracts.recipe import Batch
from paceline.data.loader import Loader
from paceline.data.source import has_one_size, sizes_of
from paceline.data.stream import Drawer, Stream, Tickets, in_order, in_order_with_crops, part
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
