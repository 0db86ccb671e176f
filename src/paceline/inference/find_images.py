"""Finds the images that a command's arguments refer to: files, folders and patterns."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from paceline.core.errors import UserError
from paceline.core.files import user_path
from paceline.core.printable import printable
from paceline.data.file_lists import SUFFIXES, Listing, first_few, is_image, list_folder
from paceline.images.decode import BadImage
from paceline.images.regions.slide_image import is_slide
from paceline.inference.skipped import SkippedImage


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
    entry_notes: dict[str, None] = {}
    unusable: dict[str, None] = {}
    skipped: list[SkippedImage] = []
    in_out = 0
    for argument in arguments:
        try:
            images, listing = _expand(argument, out)
        except BadImage as problem:
            skipped.append(SkippedImage(argument, str(problem)))
            continue
        for image in images:
            found.setdefault(os.path.abspath(image.path), image)
        others.update(dict.fromkeys(file for file in listing.files if not _is_image(file)))
        entry_notes.update(dict.fromkeys(listing.notes))
        unusable.update(dict.fromkeys(f"{argument}/{entry}" for entry in listing.unusable))
        if out and not user_path(argument).is_file():
            in_out += sum(_is_under(image.path, out) for image in images)
    if not found:
        raise UserError(f"{printable(skipped[0].path)}: {skipped[0].reason}")
    notes = list(entry_notes)
    if others:
        files = "1 other file" if len(others) == 1 else f"{len(others):,} other files"
        notes.append(f"{files} ignored: {first_few([path.name for path in others])}")
    if in_out:
        notes.append(
            f"--out {out}: is also an input folder, so running this command again would also process these results"
        )
    ignored = [*(f"{path}: not a supported image format" for path in others), *unusable]
    return FoundImages(list(found.values()), skipped, notes, ignored)


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
