"""Image pairs, an input and its target: two folders with matching file names.

The folders are `root/train/input` and `root/train/target`, and the same under `root/test`. They can also be called img
(or input, or lq) and gt, blurry (or blur) and sharp, noisy and clean, hazy and clear, or A and B. Without `train` and
`test`, a fixed fifth of the pairs is held out for testing, unless `test_root` is set.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from paceline.config.flags import SeparateTestFolder
from paceline.config.settings import setting
from paceline.core.errors import UserError
from paceline.data.file_lists import FOLDERS, by_stem, by_suffix, images_under, pair_up
from paceline.data.image_files import Files, ImageFiles, SplitNames, find_split

SPLIT_NAMES: SplitNames = {"train": ("train",), "test": ("test", "valid", "val")}


class Pairs(ImageFiles):
    """Samples whose "image" is the input and whose "target", of the same size, is the desired output."""

    @dataclass(frozen=True)
    class Settings(SeparateTestFolder):
        """File name suffixes, for pairs whose two files are in the same folder."""

        input_suffix: str = setting("", "suffix of input file names, such as _real, if targets are in the same folder")
        target_suffix: str = setting("", "suffix of target file names, such as _mean, if inputs are in the same folder")

    split_layouts = (SPLIT_NAMES,)

    def __init__(self, split: str, settings: Settings) -> None:
        listed = find_split(split, settings, SPLIT_NAMES, lambda folder: _match(folder, settings))
        super().__init__(listed, split, settings)


def _two_folders(base: Path) -> tuple[Path, Path]:
    for image, target in FOLDERS:
        if (base / image).is_dir() and (base / target).is_dir():
            return base / image, base / target
    expected = " or ".join(f"{image} and {target}" for image, target in FOLDERS)
    raise UserError(f"--data-root {base}: has no folders for inputs and targets; expected {expected}")


def _match(base: Path, settings: Pairs.Settings) -> tuple[list[Files], list[str]]:
    """Match files by their path without the suffix; return the pairs and the unmatched files."""
    ends = settings.input_suffix, settings.target_suffix
    problems: list[str] = []
    if any(ends):
        inputs, targets, problems = by_suffix(base, images_under(base), *ends)
    else:
        inputs, targets = (by_stem(folder, images_under(folder)) for folder in _two_folders(base))
    pairs, unmatched = pair_up(base, inputs, targets)
    return [{"image": image, "target": target} for image, target in pairs], problems + unmatched
