"""Your own images: one folder per class, or a single folder.

`root/train/CLASS/…` and `root/test/CLASS/…` are used as they are. With `root/CLASS/…`, a fixed fifth of the images is
held out for testing, unless `test_root` is set. Without class folders (`root/*.png`), the images have no labels.
"""

from __future__ import annotations

import dataclasses
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from paceline.config.flags import SeparateTestFolder
from paceline.config.settings import RunSettings
from paceline.contracts.recipe import DataSpec
from paceline.core.errors import UserError
from paceline.core.files import user_path
from paceline.core.text import printable
from paceline.data.file_lists import (
    SUFFIXES,
    Listing,
    check_split_names,
    describe_problems,
    existing_folder,
    is_hidden,
    is_image,
    list_folder,
    named_root,
    unreadable,
    unreadable_file,
    untrained_classes,
    unused_validation,
)
from paceline.data.source import Encoded, Sample, Source, group_keys, split_files
from paceline.data.whole_source import num_readers
from paceline.images.decode import BadImage
from paceline.images.readers import choose_reader


class _Listed(NamedTuple):
    """The files in a split."""

    base: Path
    paths: list[Path]
    labels: list[int] | None
    class_names: tuple[str, ...]
    outside: list[Path]  # images outside the class folders
    unusable: Listing  # entries that are not regular files


class Folder(Source):
    """Image files, decoded when read and centre-cropped to squares of one size; by default, RGB."""

    Settings = SeparateTestFolder
    reads_any_data = True

    @classmethod
    def measure_whole(cls, settings: RunSettings) -> RunSettings:
        assert isinstance(settings, SeparateTestFolder)
        if settings.test_root or _has_splits(existing_folder(named_root(settings), "--data-root")):
            return settings
        return dataclasses.replace(settings, test_root=settings.data_root, validation=0.0)

    def __init__(self, split: str, settings: SeparateTestFolder) -> None:
        root = existing_folder(named_root(settings), "--data-root")
        listed = _list_images(root, split, settings)
        self.paths, outside = listed.paths, listed.outside
        self.labels = None if listed.labels is None else np.array(listed.labels, dtype=np.int64)
        self.notes = listed.unusable.notes
        self.not_used = tuple(listed.unusable.unusable)
        if split == "train" and not settings.test_root and _has_splits(root):
            self.notes += unused_validation(root, root / "test")
        if outside:
            self.not_used += tuple(f"{path}: outside the class folders" for path in outside)
            self.notes += (f"{root}: images outside the class folders are not used (images affected: {len(outside)})",)
        chosen = choose_reader(self.paths, settings)
        self.reader, self.notes = chosen.reader, (*self.notes, *chosen.notes)
        if settings.bad_images == "skip":
            self._leave_out_bad(root, max(1, num_readers(settings)))
        if split == "train" and len(listed.class_names) < 2:
            has = f"only one class folder, {listed.class_names[0]!r}" if listed.class_names else "no class folders"
            inner = [listed.base / name for name in listed.class_names if _class_folders(listed.base / name)]
            remedy = f"for labels, put the images of each class in {printable(listed.base)}/CLASS"
            remedy += f", or use --data-root {printable(inner[0])}" if inner else ""
            self.class_advice = f"{printable(listed.base)}: has {has}; {remedy}"
        if split == "train" and self.labels is not None:
            self.notes += _missing_classes(root, self.labels, listed.class_names)
        self.groups = group_keys(settings.group_by, listed.base, self.paths)
        side = settings.size or self._side_of_first()
        pixels = self.reader.pixel_format
        self.spec = DataSpec(
            *(self.reader.channels, side, side, len(listed.class_names), listed.class_names),
            dtype=pixels.dtype,
            value_range=pixels.declared_range,
        )

    def __len__(self) -> int:
        return len(self.paths)

    def read(self, index: int) -> Sample:
        path = self.paths[index]
        try:
            sample = {"image": self.reader.arrange(self.reader.decode(path), self.spec.height)}
        except BadImage as error:
            raise unreadable(path, error) from error
        if self.labels is not None:
            sample["label"] = np.asarray(self.labels[index])
        return sample

    def encoded(self, index: int) -> Encoded | None:
        """Return the image file if it already has the right size, and None if it must be cropped or resized."""
        side, path = self.spec.height, self.paths[index]
        try:
            is_rgb = (self.spec.channels, self.spec.dtype) == (3, "uint8")
            fits = is_rgb and self.reader.size(path) == (side, side)
        except BadImage as error:
            raise unreadable(path, error) from error
        return self.files_of(index) if fits else None

    def files_of(self, index: int) -> Encoded | None:
        numbers = {} if self.labels is None else {"label": np.asarray(self.labels[index])}
        return Encoded({"image": self.paths[index]}, numbers)

    def originals(self, index: int) -> Encoded | None:
        return self.files_of(index)

    def name_of(self, index: int) -> str:
        return str(self.paths[index])

    def _leave_out_bad(self, root: Path, num_threads: int) -> None:
        with ThreadPoolExecutor(num_threads) as threads:  # Pillow releases the GIL while it decodes
            problems = list(threads.map(self._problem, self.paths))
        is_good = np.array([problem is None for problem in problems])
        bad = [(path, problem) for path, problem in zip(self.paths, problems, strict=True) if problem]
        if not bad:
            return
        self.paths = [path for path, good in zip(self.paths, is_good, strict=True) if good]
        self.labels = None if self.labels is None else self.labels[is_good]
        if not self.paths:
            first = f"{os.path.relpath(bad[0][0], root)}: {bad[0][1]}"
            raise UserError(f"--data-root {root}: none of its images can be read (images found: {len(bad)}): {first}")
        self.not_used += tuple(f"{path}: {problem}" for path, problem in bad)
        reasons = describe_problems([unreadable_file(os.path.relpath(path, root), problem) for path, problem in bad])
        self.notes += (f"left out {len(bad)} of {len(is_good)} images in {root}: {reasons}",)

    def _problem(self, path: Path) -> BadImage | None:
        """Return why an image cannot be decoded; None if it can."""
        try:
            self.reader.decode(path)
        except BadImage as error:
            return error
        return None

    def _side_of_first(self) -> int:
        try:
            return min(self.reader.size(self.paths[0]))
        except BadImage as error:
            raise unreadable(self.paths[0], error) from error


def _list_images(root: Path, split: str, settings: SeparateTestFolder) -> _Listed:
    test_root = settings.test_root
    has_splits = _has_splits(root)
    classes = _class_folders(root / "train" if has_splits else root)
    base = root / split if has_splits else root
    if test_root and split == "test":
        base = existing_folder(user_path(test_root), "--test-root")
    if not base.is_dir():
        raise UserError(
            f"--data-root {root}: has no folder {split!r}; add it, "
            f"or use --data-root {root / 'train'} to hold out a fixed fifth of the images for testing"
        )
    listing = list_folder(base, recursive=False, for_training=True)
    outside, labels = [file for file in listing.files if is_image(file)], None
    if classes:
        # Links to class folders are followed, so they are not listed as unusable.
        listing.unusable = [entry for entry in listing.unusable if entry.rpartition(": ")[0] not in classes]
        may_lack = split == "test" and (has_splits or bool(test_root))
        paths, labels = _list_classes(base, classes, listing, may_lack)
    else:
        paths, outside = outside, []
    if not paths:
        problem = f"--data-root {base}: has no images (supported: {', '.join(sorted(SUFFIXES))})"
        raise UserError("; ".join([problem, *listing.notes]))
    if not has_splits and not test_root:
        if len(paths) < 2:
            raise UserError(
                f"--data-root {root}: one image is too few to train and test on; add more, or set --test-root"
            )
        chosen = split_files(settings.group_by, base, paths, split)
        paths = [paths[index] for index in chosen]
        labels = None if labels is None else [labels[index] for index in chosen]
    return _Listed(base, paths, labels, tuple(classes), outside, listing)


def _has_splits(root: Path) -> bool:
    """Return whether `train` is a split folder. If there are other folders but no `test`, it is a class folder."""
    folders = {folder.name for folder in root.iterdir() if folder.is_dir() and not is_hidden(folder)}
    if {"train", "test"} <= folders or folders == {"train"}:
        return True
    check_split_names(root)
    return False


def _missing_classes(root: Path, labels: NDArray[np.int64], names: tuple[str, ...]) -> tuple[str, ...]:
    """Return a note if no training images of some classes are left: a model cannot learn these classes."""
    missing = untrained_classes(labels, names)
    return (f"{root}: {missing}; add images to these classes, or remove their folders",) if missing else ()


def _class_folders(base: Path) -> list[str]:
    return sorted(folder.name for folder in base.iterdir() if folder.is_dir() and not is_hidden(folder))


def _list_classes(
    base: Path, classes: list[str], listing: Listing, may_lack: bool
) -> tuple[list[Path], list[int] | None]:
    """Return the images of each class with their labels, and add unusable entries to the listing."""
    unknown = [name for name in _class_folders(base) if name not in classes]
    if unknown:
        raise UserError(f"--data-root {base}: class {unknown[0]!r} has no folder in the training split; add one")
    paths: list[Path] = []
    labels: list[int] = []
    for label, name in enumerate(classes):
        inside = list_folder(base / name, for_training=True) if (base / name).is_dir() else Listing()
        listing.unusable += [f"{name}/{entry}" for entry in inside.unusable]
        found = [file for file in inside.files if is_image(file)]
        if not found and not may_lack:
            problem = f"--data-root {base / name}: has no images (supported: {', '.join(sorted(SUFFIXES))})"
            raise UserError("; ".join([problem, *inside.notes, "add some, or remove the folder"]))
        paths += found
        labels += [label] * len(found)
    return paths, labels
