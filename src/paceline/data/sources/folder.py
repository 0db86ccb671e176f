"""Your own images: one folder per class, or a single folder.

`root/train/CLASS/…` and `root/test/CLASS/…` are used as they are. With `root/CLASS/…`, a fixed fifth of the images is
held out for testing, unless `test_root` is set. Without class folders (`root/*.png`), the images have no labels.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from paceline.config.flags import SeparateTestFolder
from paceline.contracts.data_spec import INPUT
from paceline.core.errors import UserError
from paceline.core.files import user_path
from paceline.core.text import printable
from paceline.data.file_lists import (
    Listing,
    check_split_names,
    existing_folder,
    group_keys,
    is_hidden,
    is_image,
    list_folder,
    named_root,
    no_images,
    split_files,
    unreadable,
)
from paceline.data.image_files import FileSamples, SampleLayout
from paceline.images.decode import BadImage


class Folder(FileSamples):
    """Image files, decoded when read and centre-cropped to squares of one size; by default, RGB."""

    Settings = SeparateTestFolder
    reads_any_data = True

    @classmethod
    def has_test_split(cls, settings: SeparateTestFolder) -> bool:
        return _has_splits(existing_folder(named_root(settings), "--data-root"))

    def __init__(self, split: str, settings: SeparateTestFolder) -> None:
        root = existing_folder(named_root(settings), "--data-root")
        has_splits, test_root = _has_splits(root), settings.test_root
        classes = _class_folders(root / "train" if has_splits else root)
        self.root = root / split if has_splits else root
        if test_root and split == "test":
            self.root = existing_folder(user_path(test_root), "--test-root")
        if not self.root.is_dir():
            raise UserError(
                f"--data-root {root}: has no folder {split!r}; add it, "
                f"or use --data-root {root / 'train'} to hold out a fixed fifth of the images for testing"
            )
        self.shown, self.stored_sizes = printable(self.root), {}
        listing = list_folder(self.root, recursive=False, for_training=True)
        outside = [file for file in listing.files if is_image(file)]
        by_class = [outside]
        if classes:
            # Links to class folders are followed, so they are not listed as unusable.
            listing.unusable = [entry for entry in listing.unusable if entry.rpartition(": ")[0] not in classes]
            may_lack = split == "test" and (has_splits or bool(test_root))
            by_class = _list_classes(self.root, classes, listing, may_lack)
        self.files = [{INPUT: path} for paths in by_class for path in paths]
        self.labels = np.repeat(np.arange(len(classes)), list(map(len, by_class))) if classes else None
        if not self.files:
            raise no_images(self.root, listing)
        self.notes, self.not_used = listing.notes, tuple(listing.unusable)
        if classes and outside:
            self.not_used += tuple(f"{path}: outside the class folders" for path in outside)
            count = f"images affected: {len(outside)}"
            self.notes += (f"{root}: images outside the class folders are not used ({count})",)
        if not has_splits and not test_root:
            paths = [files[INPUT] for files in self.files]
            self.keep(split_files(settings.group_by, self.root, paths, split, f"--data-root {self.root}"))
        self.choose_reader((files[INPUT] for files in self.files), settings)
        if self.may_skip:
            self.leave_out(self.measure_images(self.decoded_size, settings))
        if split == "train":
            self.class_advice = "" if len(classes) > 1 else _advise_on_classes(self.root, classes)
        self.groups = group_keys(settings.group_by, self.root, [files[INPUT] for files in self.files])
        try:
            side = settings.size or min(self.reader.size(self.files[0][INPUT]))
        except BadImage as error:
            raise unreadable(self.name_of(0), error) from error
        self.layout = SampleLayout((INPUT,), side=side)
        self.spec = self.make_spec(settings, len(classes), tuple(classes))

    def name_of(self, index: int) -> str:
        return str(self.files[index][INPUT])


def _has_splits(root: Path) -> bool:
    """Return whether `train` is a split folder. If there are other folders but no `test`, it is a class folder."""
    folders = {folder.name for folder in root.iterdir() if folder.is_dir() and not is_hidden(folder)}
    if {"train", "test"} <= folders or folders == {"train"}:
        return True
    check_split_names(root)
    return False


def _advise_on_classes(base: Path, classes: list[str]) -> str:
    """Return how to get several classes from a folder that has at most one."""
    has = f"only one class folder, {classes[0]!r}" if classes else "no class folders"
    inner = [base / name for name in classes if _class_folders(base / name)]
    other_root, shown = f", or use --data-root {printable(inner[0])}" if inner else "", printable(base)
    return f"{shown}: has {has}; for labels, put the images of each class in {shown}/CLASS{other_root}"


def _class_folders(base: Path) -> list[str]:
    return sorted(folder.name for folder in base.iterdir() if folder.is_dir() and not is_hidden(folder))


def _list_classes(base: Path, classes: list[str], listing: Listing, may_lack: bool) -> list[list[Path]]:
    """Return the images of each class, and add unusable entries to the listing."""
    unknown = [name for name in _class_folders(base) if name not in classes]
    if unknown:
        raise UserError(f"--data-root {base}: class {unknown[0]!r} has no folder in the training split; add one")
    by_class = []
    for name in classes:
        inside = list_folder(base / name, for_training=True) if (base / name).is_dir() else Listing()
        listing.unusable += [f"{name}/{entry}" for entry in inside.unusable]
        by_class.append([file for file in inside.files if is_image(file)])
        if not by_class[-1] and not may_lack:
            raise no_images(base / name, inside, "add some, or remove the folder")
    return by_class
