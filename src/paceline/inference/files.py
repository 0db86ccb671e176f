"""The image files that a command reads and writes: those its arguments name, their results, and their targets."""

from __future__ import annotations

import glob
import os
import re
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from paceline.core.errors import UserError
from paceline.core.files import user_path
from paceline.core.text import print_line, printable
from paceline.data.file_lists import (
    SUFFIXES,
    Listing,
    first_few,
    is_image,
    list_folder,
    not_used_file,
    write_not_used,
)
from paceline.images.decode import BadImage
from paceline.images.encode import DEFAULT_ENCODING, Encoding
from paceline.images.regions import is_slide


@dataclass(frozen=True)
class SkippedImage:
    """A file that cannot be used, or an argument that matches no file, with the reason."""

    path: str
    reason: str


def report_skipped(skipped: Sequence[SkippedImage], num_done: int, ignored: Sequence[str], out: Path | None) -> int:
    """Print the images that were skipped, and return the command's exit code.

    A long list is also written to a file alongside `out`, together with ignored folder entries.
    """
    for image in skipped:
        print_line(f"not used: {image.path}: {image.reason}", sys.stderr)
    if skipped:
        total = num_done + len(skipped)
        print_line(f"{num_done} of {total} images were processed; {len(skipped)} could not be used", sys.stderr)
    if out:
        for note in write_not_used(
            not_used_file(out), [*(f"{image.path}: {image.reason}" for image in skipped), *ignored]
        ):
            print_line(note)
    return 1 if skipped else 0


def count_images(count: int) -> str:
    """Return an image count as text, such as "1 image"."""
    return "1 image" if count == 1 else f"{count:,} images"


@dataclass(frozen=True)
class FoundImage:
    """An image file given as an argument, or found in a folder given as an argument."""

    path: Path
    name: Path  # path relative to the folder that was searched
    folder: str  # name of the folder that was searched


@dataclass
class FoundImages:
    """The images found, the arguments that match no image, and remarks to print."""

    images: list[FoundImage] = field(default_factory=list)
    skipped: list[SkippedImage] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    ignored: list[str] = field(default_factory=list)  # ignored files and folders, each with the reason


def find_images(arguments: Iterable[str], out: Path | None = None) -> FoundImages:
    """Return the images without duplicates; raise UserError if there are none.

    If `out`, the folder for results, is inside an image folder, the images in `out` are excluded.
    """
    found: dict[str, FoundImage] = {}
    others: dict[Path, None] = {}
    notes: dict[str, None] = {}
    unusable: dict[str, None] = {}
    skipped: list[SkippedImage] = []
    in_out = False
    for argument in arguments:
        try:
            images, listing = _expand(argument, out)
        except BadImage as problem:
            skipped.append(SkippedImage(argument, str(problem)))
            continue
        for image in images:
            found.setdefault(os.path.abspath(image.path), image)
        others.update(dict.fromkeys(file for file in listing.files if not _is_image(file)))
        notes.update(dict.fromkeys(listing.notes))
        unusable.update(dict.fromkeys(f"{argument}/{entry}" for entry in listing.unusable))
        if out and not user_path(argument).is_file():
            in_out |= any(_is_under(image.path, out) for image in images)
    if not found:
        raise UserError(f"{printable(skipped[0].path)}: {skipped[0].reason}")
    if others:
        files = "1 other file" if len(others) == 1 else f"{len(others):,} other files"
        notes[f"{files} ignored: {first_few([path.name for path in others])}"] = None
    if in_out:
        again = "so running this command again would also process these results"
        notes[f"--out {out}: is also an input folder, {again}"] = None
    ignored = [*(f"{path}: not a supported image format" for path in others), *unusable]
    return FoundImages(list(found.values()), skipped, list(notes), ignored)


def _expand(argument: str, out: Path | None) -> tuple[list[FoundImage], Listing]:
    """Return the images that a file, folder or pattern refers to and, for a folder, the list of its files."""
    if not argument:  # as from a variable that is not set; a path would mean the current folder
        raise BadImage("an empty argument is not the name of an image or folder")
    path = user_path(argument)
    if path.is_file():
        return [_single(path)], Listing()
    if path.is_dir():
        apart = out if out and _is_under(out, path) and _real(out) != _real(path) else None
        listing = list_folder(path)
        listing.files = [file for file in listing.files if not (apart and _is_under(file, apart))]
        images = [file for file in listing.files if _is_image(file)]
        if not images:
            raise BadImage("; ".join([f"has no images ({', '.join(sorted(SUFFIXES))})", *listing.notes]))
        return [FoundImage(file, file.relative_to(path), _real(path).name) for file in images], listing
    files = [_single(Path(match)) for match in sorted(glob.glob(str(path), recursive=True)) if Path(match).is_file()]
    if not files:
        exists = os.path.lexists(path)
        raise BadImage("not a regular file" if exists else "no such image or folder")
    return files, Listing()


def _is_image(file: Path) -> bool:
    return is_image(file) or is_slide(file)


def _single(path: Path) -> FoundImage:
    return FoundImage(path, Path(path.name), _real(path.parent).name)


def _is_under(file: Path, folder: Path) -> bool:
    return _real(file).is_relative_to(_real(folder))


def _real(path: Path) -> Path:
    return Path(os.path.realpath(path))  # Path.resolve raises an exception for a link that points to itself


@dataclass(frozen=True, eq=False)
class ImageTask:
    """An image to process, and its output files."""

    path: str
    targets: dict[str, str]  # by the name of the result
    mask: str = ""  # written with `--skip-background`

    @property
    def files(self) -> list[str]:
        """All output files."""
        return [*self.targets.values(), *([self.mask] if self.mask else [])]

    @property
    def shown_targets(self) -> str:
        """The first result's file and the number of others, to be printed."""
        first, *more = self.targets.values()
        return printable(first) + (f" and {len(more)} more" if more else "")

    def make_target(self, result: str) -> Path:
        """Return the file for a result, and create its folder."""
        target = Path(self.targets[result if result in self.targets else ""])
        target.parent.mkdir(parents=True, exist_ok=True)
        return target


@dataclass
class ApplyPlan(FoundImages):
    """The images found, with what remains to be processed."""

    tasks: list[ImageTask] = field(default_factory=list)


def plan_results(
    arguments: Iterable[str],
    out: Path,
    results: Sequence[str],
    encoding: Encoding = DEFAULT_ENCODING,
    *,
    with_masks: bool = False,
    overwrite: bool = False,
    skip_existing: bool = False,
) -> ApplyPlan:
    """Find the images and choose their output files; raise UserError if one exists, unless a flag allows it."""
    if out.exists() and not out.is_dir():
        raise UserError(f"--out {out}: is a file; choose a folder")
    plan = ApplyPlan(**vars(find_images(arguments, out)))
    plan.tasks, clashing = _name_results(plan.images, out, results, encoding, with_masks)
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
    tasks, plan.tasks, num_complete = plan.tasks, [], 0
    for task in tasks:
        present = [file for file in task.files if file in existing]
        if not present:
            plan.tasks.append(task)
        elif len(present) < len(task.files):
            what = f"{printable(present[0])} exists, but other results are missing"
            plan.skipped.append(SkippedImage(task.path, f"{what}; use --overwrite to write them all"))
        else:
            num_complete += 1
    if num_complete:
        plan.notes.append(f"{count_images(num_complete)} skipped: results already exist")


# Ways to name a result, shortest first: whether to keep the image's suffix, and whether to add its folder's name.
NAMINGS = ((False, False), (True, False), (False, True), (True, True))


def _name_results(
    images: Sequence[FoundImage], out: Path, results: Sequence[str], encoding: Encoding, with_masks: bool
) -> tuple[list[ImageTask], list[SkippedImage]]:
    """Return the images with the shortest unique names for their output files, and those without a unique name."""

    def name_files(image: FoundImage, keep_suffix: bool, in_folder: bool) -> ImageTask:
        folder = out / image.folder / image.name.parent if in_folder else out / image.name.parent
        suffix, stem = encoding.suffix(image.path), image.name.name if keep_suffix else image.name.stem
        stem = stem.removesuffix(".ome") if suffix == ".ome.tif" and not keep_suffix else stem
        targets = {result: str(folder / f"{stem}{f'-{result}' if result else ''}{suffix}") for result in results}
        return ImageTask(str(image.path), targets, str(folder / f"{stem}-mask.png") if with_masks else "")

    named: dict[FoundImage, ImageTask] = {}
    unnamed = list(images)
    for naming in NAMINGS:
        proposed = {image: name_files(image, *naming) for image in unnamed}
        counts = Counter(file for tasks in (proposed, named) for task in tasks.values() for file in task.files)
        named |= {image: task for image, task in proposed.items() if all(counts[file] == 1 for file in task.files)}
        unnamed = [image for image in unnamed if image not in named]
    reason = "another image has the same output file; process the two images with different --out folders"
    clashing = [SkippedImage(str(image.path), reason) for image in unnamed]
    return [named[image] for image in images if image in named], clashing


SEPARATORS = "-_. "
SCALE = re.compile(r"(?i)x\d+")  # the result 0001x4 matches the target 0001


def match_files(
    results: Sequence[Path], targets: Sequence[Path], suffix: str = ""
) -> tuple[list[tuple[Path, Path]], list[str]]:
    """Return each result paired with its target, and messages about files without a match.

    Names match if they are equal without file extensions, or if the result's name has one extra word at either end, as
    in `22_2_segmentation` or `sr_castle`. With `suffix`, only results whose names end with it are used.
    """
    if len(results) == len(targets) == 1:
        return [(results[0], targets[0])], []
    results = with_suffix(results, suffix)
    by_stem: dict[str, Path] = {}
    for target in targets:
        if target.stem in by_stem:
            raise UserError(f"{target} and {by_stem[target.stem]}: two targets have the same name; rename one")
        by_stem[target.stem] = target
    pairs: list[tuple[Path, Path]] = []
    problems: list[str] = []
    taken: dict[str, Path] = {}
    for result in results:
        stem = _target_of(result.stem.removesuffix(suffix) if suffix else result.stem, by_stem)
        if not stem:
            problems.append(f"{result}: has no matching target")
        elif stem in taken:
            raise UserError(
                f"{result} and {taken[stem]}: both match {by_stem[stem]}; choose results with --suffix, e.g. "
                f"--suffix {result.stem.removeprefix(stem) or '-sr'}"
            )
        else:
            taken[stem] = result
            pairs.append((result, by_stem[stem]))
    problems += [f"{target}: has no matching result" for stem, target in by_stem.items() if stem not in taken]
    return pairs, problems


def with_suffix(results: Sequence[Path], suffix: str) -> list[Path]:
    """Return the results whose names without the extension end with `suffix`. Raise UserError if there are none."""
    found = [file for file in results if file.stem.endswith(suffix)]
    if not found:
        raise UserError(f"--suffix {suffix}: none of the results has a name that ends with this suffix")
    return found


def _target_of(stem: str, targets: dict[str, Path]) -> str:
    """Return the target name that equals a result's name or is its longest prefix or suffix; "" if there is none."""

    def extends(target: str) -> bool:
        after, before = stem.removeprefix(target), stem.removesuffix(target)
        starts = after != stem and (after[0] in SEPARATORS or SCALE.fullmatch(after) is not None)
        return starts or (before != stem and before[-1] in SEPARATORS)

    return stem if stem in targets else max(filter(extends, targets), key=len, default="")
