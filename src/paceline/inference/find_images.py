"""Finds the images that a command's arguments refer to: files, folders and patterns."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from paceline.core.errors import UserError
from paceline.data.file_lists import SUFFIXES, first_few, images_in, visible_under
from paceline.images.decode import BadImage
from paceline.inference.skipped import SkippedImage


@dataclass(frozen=True)
class FoundImage:
    """An image file given as an argument, or found in a folder given as an argument."""

    path: Path
    name: Path  # relative to the folder in which it was found
    folder: str  # the name of that folder


@dataclass
class FoundImages:
    """The images found, the arguments that match no image, and remarks to print."""

    images: list[FoundImage] = field(default_factory=list)
    skipped: list[SkippedImage] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def find_images(arguments: Iterable[str], out: Path | None = None) -> FoundImages:
    """Return the images without duplicates; raise UserError if there are none.

    If `out`, the folder for results, lies inside a folder of images, the images in it are excluded.
    """
    found: dict[str, FoundImage] = {}
    others: dict[Path, None] = {}
    skipped: list[SkippedImage] = []
    in_out = 0
    for argument in arguments:
        try:
            images, other_files = _expand(argument, out)
        except BadImage as problem:
            skipped.append(SkippedImage(argument, str(problem)))
            continue
        for image in images:
            found.setdefault(os.path.abspath(image.path), image)
        others.update(dict.fromkeys(other_files))
        if out and not Path(argument).expanduser().is_file():
            in_out += sum(_is_under(image.path, out) for image in images)
    if not found:
        raise UserError(f"{skipped[0].path}: {skipped[0].reason}")
    notes = []
    if others:
        files = "1 other file" if len(others) == 1 else f"{len(others):,} other files"
        notes.append(f"{files} ignored: {first_few([path.name for path in others])}")
    if in_out:
        notes.append(f"--out {out}: is also an input folder, so the next call would read these results, too")
    return FoundImages(list(found.values()), skipped, notes)


def _expand(argument: str, out: Path | None) -> tuple[list[FoundImage], list[Path]]:
    """Return the images that a file, folder or pattern refers to, and the other files in a folder."""
    path = Path(argument).expanduser()
    if path.is_file():
        return [_single(path)], []
    if path.is_dir():
        apart = None if out is None or out.resolve() == path.resolve() else out
        inside = [file for file in visible_under(path) if not (apart and _is_under(file, apart))]
        images = images_in(inside)
        if not images:
            raise BadImage(f"has no images ({', '.join(sorted(SUFFIXES))})")
        others = sorted(file for file in set(inside).difference(images) if file.is_file())
        return [FoundImage(file, file.relative_to(path), path.resolve().name) for file in images], others
    files = [_single(Path(match)) for match in sorted(glob.glob(str(path), recursive=True)) if Path(match).is_file()]
    if not files:
        raise BadImage("no such image or folder")
    return files, []


def _single(path: Path) -> FoundImage:
    return FoundImage(path, Path(path.name), path.parent.resolve().name)


def _is_under(file: Path, folder: Path) -> bool:
    return file.resolve().is_relative_to(folder.resolve())
