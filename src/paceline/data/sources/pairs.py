"""Pictures in pairs, what goes in and what should come out: two folders with the same paths in them.

`root/train/input/…` with `root/train/target/…`, and `root/test/…` likewise; the two folders may also be called img
and gt, or blurry and sharp. Without `train` and `test` a fixed fifth is kept for testing.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from paceline.config.settings import RunSettings
from paceline.core.errors import UserError
from paceline.data.file_lists import by_stem, named_root, pictures_under
from paceline.data.fixed_split import fixed_split
from paceline.data.image_files import Files, PictureFiles, Sizes, split_folder

FOLDERS = (("input", "target"), ("img", "gt"), ("blurry", "sharp"), ("blur", "sharp"))
SPLIT_NAMES = {"train": ("train",), "test": ("test", "valid", "val")}


class Pairs(PictureFiles):
    """The sample's "image" goes in, and its "target", of the same size, should come out."""

    def __init__(self, split: str, settings: RunSettings) -> None:
        root = named_root(settings)
        split_root = split_folder(root, split, SPLIT_NAMES)
        base = split_root or root
        samples, problems = _match(base, *_two_folders(base))
        if split_root is None and len(samples) > 1:
            samples = [samples[index] for index in fixed_split(len(samples), split)]
        elif split_root is None and samples:
            raise UserError(f"--data-root {root}: one pair is too few for a train and a test split")
        super().__init__(base, samples, split, settings, problems)

    def find_fault(self, names: Mapping[str, str], sizes: Sizes) -> str:
        if sizes["image"] == sizes["target"]:
            return ""
        (height, width), (target_height, target_width) = sizes["image"], sizes["target"]
        return f"{names['image']} has {width}×{height} pixels and {names['target']} {target_width}×{target_height}"


def _two_folders(base: Path) -> tuple[Path, Path]:
    for image, target in FOLDERS:
        if (base / image).is_dir() and (base / target).is_dir():
            return base / image, base / target
    expected = " or ".join(f"{image} and {target}" for image, target in FOLDERS)
    raise UserError(f"--data-root {base}: has no pair of folders; expected {expected}")


def _match(base: Path, images: Path, targets: Path) -> tuple[list[Files], list[str]]:
    """The pairs by their path without the suffix, and what is wrong with the files that make none."""
    left, right = (by_stem(folder, pictures_under(folder)) for folder in (images, targets))
    samples = [{"image": left[key], "target": right[key]} for key in sorted(left.keys() & right.keys())]
    problems = [f"{left[key].relative_to(base)} has no partner" for key in sorted(left.keys() - right.keys())]
    problems += [f"{right[key].relative_to(base)} has no partner" for key in sorted(right.keys() - left.keys())]
    return samples, problems
