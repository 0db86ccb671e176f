"""Your own images: one folder per class, or a single folder.

`root/train/CLASS/…` and `root/test/CLASS/…` are used as they are. With `root/CLASS/…`, a fixed fifth of the images is
held out for testing, unless `test_root` is set. Without class folders (`root/*.png`), the images have no labels.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from paceline.config.flags import SeparateTestFolder
from paceline.contracts.data_spec import INPUT
from paceline.core.errors import UserError
from paceline.core.files import user_path
from paceline.core.text import printable
from paceline.data.file_lists import (
    Listing,
    check_split_names,
    existing_folder,
    is_hidden,
    is_image,
    list_folder,
    named_root,
    no_images,
    unreadable,
    untrained_classes,
    unused_validation,
)
from paceline.data.image_files import FileSamples
from paceline.data.image_samples import SampleLayout
from paceline.data.source import group_keys, split_files
from paceline.images.decode import BadImage


class _Listed(NamedTuple):
    """The files in a split."""

    base: Path
    paths: list[Path]
    labels: list[int] | None
    class_names: tuple[str, ...]
    outside: list[Path]  # images outside the class folders
    unusable: Listing  # entries that are not regular files


class Folder(FileSamples):
    """Image files, decoded when read and centre-cropped to squares of one size; by default, RGB."""

    Settings = SeparateTestFolder
    reads_any_data = True

    @classmethod
    def has_test_split(cls, settings: SeparateTestFolder) -> bool:
        return _has_splits(existing_folder(named_root(settings), "--data-root"))

    def __init__(self, split: str, settings: SeparateTestFolder) -> None:
        root = existing_folder(named_root(settings), "--data-root")
        listed = _list_images(root, split, settings)
        self.root, self.shown, self.stored_sizes = listed.base, printable(listed.base), {}
        self.files = [{INPUT: path} for path in listed.paths]
        self.labels = None if listed.labels is None else np.array(listed.labels, dtype=np.int64)
        self.notes, self.not_used = listed.unusable.notes, tuple(listed.unusable.unusable)
        if split == "train" and not settings.test_root and _has_splits(root):
            self.notes += unused_validation(root, root / "test")
        if listed.outside:
            self.not_used += tuple(f"{path}: outside the class folders" for path in listed.outside)
            count = f"images affected: {len(listed.outside)}"
            self.notes += (f"{root}: images outside the class folders are not used ({count})",)
        self.choose_reader((files[INPUT] for files in self.files), settings)
        if self.may_skip:
            self.leave_out(self.measure_images(self.decoded_size, settings))
        if split == "train":
            self.class_advice = "" if len(listed.class_names) > 1 else _advise_on_classes(listed)
            self.notes += _missing_classes(root, self.labels, listed.class_names)
        self.groups = group_keys(settings.group_by, listed.base, [files[INPUT] for files in self.files])
        self.layout = SampleLayout((INPUT,), side=settings.size or self._side_of_first())
        self.spec = self.make_spec(settings, len(listed.class_names), listed.class_names)

    def name_of(self, index: int) -> str:
        return str(self.files[index][INPUT])

    def _side_of_first(self) -> int:
        try:
            return min(self.reader.size(self.files[0][INPUT]))
        except BadImage as error:
            raise unreadable(self.name_of(0), error) from error


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
        raise no_images(base, listing)
    if not has_splits and not test_root:
        chosen = split_files(settings.group_by, base, paths, split, f"--data-root {base}")
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


def _advise_on_classes(listed: _Listed) -> str:
    """Return how to get several classes from a folder that has at most one."""
    base, names = listed.base, listed.class_names
    has = f"only one class folder, {names[0]!r}" if names else "no class folders"
    inner = [base / name for name in names if _class_folders(base / name)]
    other_root = f", or use --data-root {printable(inner[0])}" if inner else ""
    return (
        f"{printable(base)}: has {has}; for labels, put the images of each class in {printable(base)}/CLASS{other_root}"
    )


def _missing_classes(root: Path, labels: NDArray[np.int64] | None, names: tuple[str, ...]) -> tuple[str, ...]:
    """Return a note if no training images of some classes are left: a model cannot learn these classes."""
    missing = "" if labels is None else untrained_classes(labels, names)
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
            raise no_images(base / name, inside, "add some, or remove the folder")
        paths += found
        labels += [label] * len(found)
    return paths, labels
