"""Your own pictures: a folder per class, or just a folder.

`root/train/CLASS/…` and `root/test/CLASS/…` are used as they are; from `root/CLASS/…` a fixed fifth is kept for
testing. Without folders for classes (`root/*.png`) the pictures have no labels.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from paceline.config.settings import RunSettings
from paceline.contracts.recipe import DataSpec
from paceline.core.errors import UserError
from paceline.data.file_lists import SUFFIXES, first_few, is_hidden, named_root, pictures_in, unreadable
from paceline.data.fixed_split import fixed_split
from paceline.data.source import Encoded, Sample, Source
from paceline.images.decode import (
    BadPicture,
    arrange_picture,
    check_picture_settings,
    decode,
    short_side,
    upright_size,
)


class Folder(Source):
    """Pictures in files, decoded when read: colour unless `channels` is 1, square, of one size."""

    def __init__(self, split: str, settings: RunSettings) -> None:
        check_picture_settings(settings)
        root = named_root(settings)
        if not root.is_dir():
            raise UserError(f"--data-root {root}: no such folder")
        self.paths, labels, class_names, unused = _list_pictures(root, split)
        self.labels = None if labels is None else np.array(labels, dtype=np.int64)
        self.notes = (f"{unused} pictures in {root} lie outside its class folders and are not used",) if unused else ()
        if settings.bad_images == "skip":
            self._leave_out_bad(root, max(1, settings.workers))
        channels = settings.channels or 3
        side = settings.size or self._side_of_first()
        self.spec = DataSpec(channels, side, side, len(class_names), class_names)

    def __len__(self) -> int:
        return len(self.paths)

    def read(self, index: int) -> Sample:
        path = self.paths[index]
        try:
            sample = {"image": arrange_picture(decode(path), self.spec.height, self.spec.channels)}
        except BadPicture as error:
            raise unreadable(path, error) from error
        if self.labels is not None:
            sample["label"] = np.asarray(self.labels[index])
        return sample

    def encoded(self, index: int) -> Encoded | None:
        """Only of pictures that are square and of the right size already; others are cut and scaled."""
        side, path = self.spec.height, self.paths[index]
        try:
            fits = self.spec.channels == 3 and upright_size(path) == (side, side)
        except BadPicture as error:
            raise unreadable(path, error) from error
        return self.made_of(index) if fits else None

    def made_of(self, index: int) -> Encoded | None:
        numbers = {} if self.labels is None else {"label": np.asarray(self.labels[index])}
        return Encoded({"image": self.paths[index]}, numbers)

    def _leave_out_bad(self, root: Path, num_threads: int) -> None:
        with ThreadPoolExecutor(num_threads) as threads:  # Pillow lets go of the interpreter while it decodes
            is_good = np.fromiter(threads.map(_is_readable, self.paths), dtype=bool, count=len(self.paths))
        bad = [str(path.relative_to(root)) for path, good in zip(self.paths, is_good, strict=True) if not good]
        if not bad:
            return
        self.paths = [path for path, good in zip(self.paths, is_good, strict=True) if good]
        self.labels = None if self.labels is None else self.labels[is_good]
        if not self.paths:
            raise UserError(f"--data-root {root}: none of its {len(bad)} pictures can be read")
        self.notes += (f"left out {len(bad)} unreadable of {len(is_good)} pictures in {root}: {first_few(bad)}",)

    def _side_of_first(self) -> int:
        try:
            return short_side(self.paths[0])
        except BadPicture as error:
            raise unreadable(self.paths[0], error) from error


def _list_pictures(root: Path, split: str) -> tuple[list[Path], list[int] | None, tuple[str, ...], int]:
    """The split's files, their labels, the classes, and how many pictures lie outside of classes."""
    has_splits = _has_splits(root)
    classes = _class_folders(root / "train" if has_splits else root)
    base = root / split if has_splits else root
    if not base.is_dir():
        raise UserError(
            f"--data-root {root}: has no folder {split!r}; add it, or give {root / 'train'} to hold out a fixed fifth"
        )
    if classes:
        paths, labels = _list_classes(base, classes, may_lack=has_splits and split == "test")
        unused = len(pictures_in(base.iterdir()))
    else:
        paths, labels, unused = pictures_in(base.iterdir()), None, 0
    if not paths:
        raise UserError(f"--data-root {base}: has no pictures ({', '.join(sorted(SUFFIXES))})")
    if not has_splits:
        if len(paths) < 2:
            raise UserError(f"--data-root {root}: one picture is too few for a train and a test split")
        chosen = fixed_split(len(paths), split)
        paths = [paths[index] for index in chosen]
        labels = None if labels is None else [labels[index] for index in chosen]
    return paths, labels, tuple(classes), unused


def _has_splits(root: Path) -> bool:
    """Whether `train` is a split; beside other folders and without `test`, it is a class of that name."""
    folders = {folder.name for folder in root.iterdir() if folder.is_dir() and not is_hidden(folder)}
    return {"train", "test"} <= folders or folders == {"train"}


def _class_folders(base: Path) -> list[str]:
    return sorted(folder.name for folder in base.iterdir() if folder.is_dir() and not is_hidden(folder))


def _list_classes(base: Path, classes: list[str], may_lack: bool) -> tuple[list[Path], list[int]]:
    unknown = [name for name in _class_folders(base) if name not in classes]
    if unknown:
        raise UserError(f"--data-root {base}: class {unknown[0]!r} has no folder of training pictures")
    paths: list[Path] = []
    labels: list[int] = []
    for label, name in enumerate(classes):
        found = pictures_in((base / name).rglob("*"))
        if not found and not may_lack:
            raise UserError(f"--data-root {base / name}: has no pictures ({', '.join(sorted(SUFFIXES))})")
        paths += found
        labels += [label] * len(found)
    return paths, labels


def _is_readable(path: Path) -> bool:
    try:
        decode(path)
    except BadPicture:
        return False
    return True
