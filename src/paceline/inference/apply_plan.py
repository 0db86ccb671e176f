"""Chooses the names of the files that `apply` writes. Existing files are overwritten only with `--overwrite`."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.core.activity import counted
from paceline.core.errors import UserError
from paceline.core.printable import printable
from paceline.images.decode import ABOVE_LIMIT, BadImage
from paceline.images.encode import DEFAULT_ENCODING, Encoding
from paceline.images.readers import image_size
from paceline.inference.applier import ImageTask
from paceline.inference.find_images import FoundImage, find_images
from paceline.inference.region_plan import OME_FORMAT, RegionOptions, region_size
from paceline.inference.skipped import SkippedImage, count_images

# Ways to name a result, shortest first: whether to keep the image's suffix, and whether to add its folder's name.
NAMINGS = ((False, False), (True, False), (False, True), (True, True))


@dataclass(frozen=True)
class ApplyPlan:
    """The images to process, the images to skip, and remarks to print before the work starts."""

    tasks: list[ImageTask]
    skipped: list[SkippedImage]
    notes: list[str]
    ignored: list[str]  # ignored files and folders, each with the reason

    @property
    def num_images(self) -> int:
        """The number of images found, not counting images whose results already exist."""
        return len(self.tasks) + len(self.skipped)


def plan_results(
    arguments: Iterable[str],
    out: Path,
    results: Sequence[str],
    encoding: Encoding = DEFAULT_ENCODING,
    *,
    overwrite: bool = False,
    skip_existing: bool = False,
) -> ApplyPlan:
    """Find the images and choose their output files; raise UserError if one exists, unless a flag allows it."""
    if out.exists() and not out.is_dir():
        raise UserError(f"--out {out}: is a file; choose a folder")
    found = find_images(arguments, out)
    targets, clashing = _name_results(found.images, out, results, encoding)
    _check_inputs(found.images, targets, out)
    tasks = [
        ImageTask(str(image.path), {result: str(file) for result, file in files.items()})
        for image, files in targets.items()
    ]
    skipped, notes = [*found.skipped, *clashing], found.notes
    if skip_existing:
        tasks, incomplete, num_existing = _without_existing(tasks)
        skipped += incomplete
        if num_existing:
            notes.append(f"{count_images(num_existing)} skipped: results already exist")
    elif not overwrite:
        _check_existing(tasks, out)
    return ApplyPlan(tasks, skipped, notes, found.ignored)


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
            height, width = region or image_size(Path(task.path))
            sizes[task] = TaskSize(height * width, region is not None)
        except BadImage as error:
            hint = "; save it as a tiled TIFF, which is read by region" if ABOVE_LIMIT in str(error) else ""
            plan.skipped.append(SkippedImage(task.path, f"{error}{hint}"))
    return sizes


def _name_results(
    images: Sequence[FoundImage], out: Path, results: Sequence[str], encoding: Encoding
) -> tuple[dict[FoundImage, dict[str, Path]], list[SkippedImage]]:
    """Return the output files for each image, with the shortest unique names, and the images without a unique name."""
    named: dict[FoundImage, dict[str, Path]] = {}
    taken: set[Path] = set()
    left = list(images)
    for with_suffix, in_folder in NAMINGS:
        proposed = {
            image: _targets(image, out, results, encoding.suffix(image.path), with_suffix, in_folder) for image in left
        }
        counts = Counter(target for targets in proposed.values() for target in targets.values())
        fitting = {
            image: targets
            for image, targets in proposed.items()
            if all(counts[target] == 1 and target not in taken for target in targets.values())
        }
        named |= fitting
        taken.update(target for targets in fitting.values() for target in targets.values())
        left = [image for image in left if image not in fitting]
    reason = "another image has the same output file; process the two images with different --out folders"
    return {image: named[image] for image in images if image in named}, [
        SkippedImage(str(image.path), reason) for image in left
    ]


def _targets(
    image: FoundImage, out: Path, results: Sequence[str], suffix: str, with_suffix: bool, in_folder: bool
) -> dict[str, Path]:
    folder = out / image.folder / image.name.parent if in_folder else out / image.name.parent
    stem = image.name.name if with_suffix else image.name.stem
    if suffix == ".ome.tif" and not with_suffix:
        stem = stem.removesuffix(".ome")
    return {result: folder / (f"{stem}-{result}{suffix}" if result else f"{stem}{suffix}") for result in results}


def _check_inputs(images: Sequence[FoundImage], targets: dict[FoundImage, dict[str, Path]], out: Path) -> None:
    """Raise UserError if a result would overwrite an input image."""
    inputs = {os.path.realpath(image.path) for image in images}
    for files in targets.values():
        for file in files.values():
            if os.path.realpath(file) in inputs:
                raise UserError(
                    f"--out {out}: {printable(file)} is an input and would be overwritten; choose a different folder"
                )


def _check_existing(tasks: Sequence[ImageTask], out: Path) -> None:
    existing = [target for task in tasks for target in task.targets.values() if os.path.lexists(target)]
    if existing:
        more = f" and {len(existing) - 1:,} more" if len(existing) > 1 else ""
        verb, them = ("exist", "them") if more else ("exists", "it")
        flags = f"use --overwrite to replace {them}, or --skip-existing to keep {them}"
        raise UserError(f"--out {out}: {printable(existing[0])}{more} {verb}; {flags}")


def _without_existing(tasks: Sequence[ImageTask]) -> tuple[list[ImageTask], list[SkippedImage], int]:
    """Return the tasks without existing results, the images with some results, and the number of finished images."""
    left, incomplete, num_complete = [], [], 0
    for task in tasks:
        existing = [target for target in task.targets.values() if os.path.lexists(target)]
        if not existing:
            left.append(task)
        elif len(existing) == len(task.targets):
            num_complete += 1
        else:
            reason = (
                f"{printable(existing[0])} exists, but other results are missing; use --overwrite to write them all"
            )
            incomplete.append(SkippedImage(task.path, reason))
    return left, incomplete, num_complete
