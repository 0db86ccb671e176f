"""The pipeline behind `apply`: decoding, computation and encoding of different images overlap."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby
from typing import TypeAlias

import torch

from paceline.core.ordered_map import ByteBudget, num_cores, ordered_map
from paceline.data.memory import free_bytes
from paceline.inference.applier import AppliedImage, Applier, ComputedImage, ImageTask, OpenedImage
from paceline.inference.apply_plan import TaskSize
from paceline.inference.apply_progress import ApplyProgress
from paceline.inference.composer import BATCH_PX, Advance
from paceline.inference.region_applier import RegionApplier
from paceline.inference.region_plan import RegionOptions
from paceline.inference.skipped import SkippedImage

MAX_RESULT_BYTES, SHARE_OF_FREE = 2_000_000_000, 0.25  # for results that are being computed or written
MAX_INPUT_BYTES = 500_000_000  # for decoded images that wait to be processed
BYTES_PER_INPUT_PX = 4
MOST_IMAGES_AT_ONCE = 64

Outcome: TypeAlias = AppliedImage | SkippedImage


def apply_all(
    applier: Applier, sizes: Mapping[ImageTask, TaskSize], options: RegionOptions, progress: ApplyProgress
) -> Iterator[Outcome]:
    """Yield the outcome of each image, in order. Images that are processed by region are processed one at a time."""
    by_region = RegionApplier(applier, options)
    for is_region, tasks in groupby(sizes, key=lambda task: sizes[task].by_region):
        if is_region:
            yield from (by_region.process(task, progress) for task in tasks)
        else:
            yield from _apply_whole(applier, {task: sizes[task].num_pixels for task in tasks}, progress.advance)


def _apply_whole(applier: Applier, num_pixels: Mapping[ImageTask, int], advance: Advance) -> Iterator[Outcome]:
    """Yield the outcome of images that are read as a whole, in order."""
    budget = ByteBudget(min(MAX_RESULT_BYTES, int(free_bytes(torch.device("cpu")) * SHARE_OF_FREE)))
    cores = num_cores()

    def compute(numbered: tuple[int, list[OpenedImage] | SkippedImage]) -> list[ComputedImage | SkippedImage]:
        turn, group = numbered
        if isinstance(group, SkippedImage):
            budget.take(0, turn)
            return [group]
        size = sum(map(applier.result_bytes, group))
        budget.take(size, turn)
        try:
            return [*applier.compute(group, advance)]
        except BaseException:
            budget.give_back(size)
            raise

    def write(made: ComputedImage | SkippedImage) -> Outcome:
        if isinstance(made, SkippedImage):
            return made
        try:
            return applier.write(made)
        finally:
            budget.give_back(made.result_bytes)

    opened = ordered_map(
        applier.open,
        num_pixels,
        cores,
        num_bytes=lambda task: num_pixels[task] * BYTES_PER_INPUT_PX,
        max_bytes=MAX_INPUT_BYTES,
    )
    groups = _groups(opened, MOST_IMAGES_AT_ONCE if applier.composer.batches_images else 1)
    computed = ordered_map(compute, enumerate(groups), len(applier.pool.runners), stop=budget.close)
    written = ordered_map(write, _flattened(computed), cores)
    try:
        yield from written
    finally:  # close the stages in this order, so that none waits for another
        written.close()
        computed.close()
        opened.close()


def _flattened(lists: Iterable[list[ComputedImage | SkippedImage]]) -> Iterator[ComputedImage | SkippedImage]:
    """Yield the elements of lists, releasing each element after use."""
    for some in lists:
        some.reverse()
        while some:
            yield some.pop()


def _groups(images: Iterable[OpenedImage | SkippedImage], most: int) -> Iterator[list[OpenedImage] | SkippedImage]:
    """Yield consecutive images of one shape together, as long as they are small; `most` limits their number."""
    group: list[OpenedImage] = []
    for image in images:
        if group and (isinstance(image, SkippedImage) or not _fits(group, image, most)):
            yield group
            group = []
        if isinstance(image, SkippedImage):
            yield image
        else:
            group.append(image)
    if group:
        yield group


def _fits(group: list[OpenedImage], image: OpenedImage, most: int) -> bool:
    first, own = group[0].pixels, image.pixels
    height, width = own.shape[:2]
    num_pixels = (len(group) + 1) * height * width
    return len(group) < most and num_pixels <= BATCH_PX and (first.shape, first.dtype) == (own.shape, own.dtype)
