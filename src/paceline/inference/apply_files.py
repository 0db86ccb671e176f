"""The files of `apply`: their names, and the pipeline that decodes, computes and encodes them."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import TypeAlias

import torch

from paceline.core.errors import UserError
from paceline.core.ordered_map import ByteBudget, num_cores, ordered_map
from paceline.core.terminal import counted
from paceline.core.text import printable
from paceline.data.whole_source import free_bytes
from paceline.images.decode import BadImage, memory_limit
from paceline.images.encode import DEFAULT_ENCODING, Encoding
from paceline.images.readers import image_size
from paceline.inference.apply import AppliedImage, Applier, ApplyProgress, ComputedImage, ImageTask, OpenedImage
from paceline.inference.apply_regions import OME_FORMAT, WHOLE_IMAGE, RegionApplier, RegionOptions, region_size
from paceline.inference.files import FoundImage, FoundImages, SkippedImage, count_images, find_images
from paceline.inference.tiles import BATCH_PX, Advance

# Ways to name a result, shortest first: whether to keep the image's suffix, and whether to add its folder's name.
NAMINGS = ((False, False), (True, False), (False, True), (True, True))


@dataclass
class ApplyPlan(FoundImages):
    """The images found, with what remains to be processed."""

    tasks: list[ImageTask] = field(default_factory=list)

    @property
    def num_images(self) -> int:
        """The number of images found, not counting images whose results already exist."""
        return len(self.tasks) + len(self.skipped)


def plan_results(
    arguments: Iterable[str],
    out: Path,
    results: Sequence[str],
    encoding: Encoding = DEFAULT_ENCODING,
    options: RegionOptions = WHOLE_IMAGE,
    *,
    overwrite: bool = False,
    skip_existing: bool = False,
) -> ApplyPlan:
    """Find the images and choose their output files; raise UserError if one exists, unless a flag allows it."""
    if out.exists() and not out.is_dir():
        raise UserError(f"--out {out}: is a file; choose a folder")
    plan = ApplyPlan(**vars(find_images(arguments, out)))
    plan.tasks, clashing = _name_results(plan.images, out, _Naming(results, encoding, options))
    plan.skipped += clashing
    inputs = {os.path.realpath(image.path) for image in plan.images}
    for file in (file for task in plan.tasks for file in task.files):
        if os.path.realpath(file) in inputs:
            raise UserError(
                f"--out {out}: {printable(file)} is an input and would be overwritten; choose a different folder"
            )
    existing = [file for task in plan.tasks for file in task.files if os.path.lexists(file)]
    if skip_existing:
        _skip_existing(plan, set(existing))
    elif existing and not overwrite:
        more = f" and {len(existing) - 1:,} more" if len(existing) > 1 else ""
        verb, them = ("exist", "them") if more else ("exists", "it")
        flags = f"use --overwrite to replace {them}, or --skip-existing to keep {them}"
        raise UserError(f"--out {out}: {printable(existing[0])}{more} {verb}; {flags}")
    return plan


def _skip_existing(plan: ApplyPlan, existing: set[str]) -> None:
    """Leave images with existing results out of the tasks; skip those that lack some results."""
    tasks, plan.tasks = plan.tasks, []
    for task in tasks:
        present = [file for file in task.files if file in existing]
        if not present:
            plan.tasks.append(task)
        elif len(present) < len(task.files):
            what = f"{printable(present[0])} exists, but other results are missing"
            plan.skipped.append(SkippedImage(task.path, f"{what}; use --overwrite to write them all"))
    num_complete = sum(existing.issuperset(task.files) for task in tasks)
    if num_complete:
        plan.notes.append(f"{count_images(num_complete)} skipped: results already exist")


@dataclass(frozen=True)
class TaskSize:
    """The number of pixels of an image, and whether it is processed by region."""

    num_pixels: int
    by_region: bool


def read_headers(plan: ApplyPlan, options: RegionOptions, format_: str = "") -> dict[ImageTask, TaskSize]:
    """Return the size of each task with a valid image header; mark the others as skipped."""
    sizes: dict[ImageTask, TaskSize] = {}
    for task in counted(plan.tasks, "reading image headers", len(plan.tasks)):
        try:
            region = region_size(Path(task.path), options, is_forced=format_ == OME_FORMAT)
            height, width = region or image_size(Path(task.path), memory_limit)
            sizes[task] = TaskSize(height * width, region is not None)
        except BadImage as error:
            plan.skipped.append(SkippedImage(task.path, str(error)))
    return sizes


@dataclass(frozen=True)
class _Naming:
    """What is written for each image."""

    results: Sequence[str]
    encoding: Encoding
    options: RegionOptions

    def task(self, image: FoundImage, out: Path, with_suffix: bool, in_folder: bool) -> ImageTask:
        """Return an image with the names of its output files."""
        folder = out / image.folder / image.name.parent if in_folder else out / image.name.parent
        suffix = self.encoding.suffix(image.path)
        stem = image.name.name if with_suffix else image.name.stem
        if suffix == ".ome.tif" and not with_suffix:
            stem = stem.removesuffix(".ome")
        stems = {result: str(folder / (f"{stem}-{result}" if result else stem)) for result in self.results}
        return ImageTask(
            str(image.path),
            {result: f"{own}{suffix}" for result, own in stems.items()},
            {result: f"{own}-preview.jpg" for result, own in stems.items()} if self.options.preview else {},
            str(folder / f"{stem}-mask.png") if self.options.skip_background else "",
        )


def _name_results(
    images: Sequence[FoundImage], out: Path, naming: _Naming
) -> tuple[list[ImageTask], list[SkippedImage]]:
    """Return the images with the shortest unique names for their output files, and those without a unique name."""
    named: dict[FoundImage, ImageTask] = {}
    left = list(images)
    for with_suffix, in_folder in NAMINGS:
        proposed = {image: naming.task(image, out, with_suffix, in_folder) for image in left}
        counts = Counter(file for tasks in (proposed, named) for task in tasks.values() for file in task.files)
        named |= {image: task for image, task in proposed.items() if all(counts[file] == 1 for file in task.files)}
        left = [image for image in left if image not in named]
    reason = "another image has the same output file; process the two images with different --out folders"
    return [named[image] for image in images if image in named], [
        SkippedImage(str(image.path), reason) for image in left
    ]


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
        size = sum(applier.result_bytes(image.pixels) for image in group)
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
            budget.give_back(applier.result_bytes(made.opened.pixels))

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
