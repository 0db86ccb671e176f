"""Image pairs, an input and its target: two folders with matching file names.

The folders are `root/train/input` and `root/train/target`, and the same under `root/test`. They can also be called img
(or input, or lq) and gt, blurry (or blur) and sharp, noisy and clean, hazy and clear, or A and B. Without `train` and
`test`, a fixed fifth of the pairs is held out for testing, unless `test_root` is set.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from paceline.config.flags import SeparateTestFolder
from paceline.config.settings import setting
from paceline.core.errors import UserError
from paceline.data.file_lists import FOLDERS, SIZES_DIFFER, Problem, by_stem, by_suffix, images_under, named_root
from paceline.data.image_files import Files, ImageFiles, Sizes, SplitNames, separate_folder, split_folder
from paceline.data.source import split_files

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
        base, samples, problems = _find(split, settings)
        super().__init__(base, samples, split, settings, problems)

    def find_problem(self, names: Mapping[str, str], sizes: Sizes) -> Problem | None:
        if sizes["image"] == sizes["target"]:
            return None
        (height, width), (target_height, target_width) = sizes["image"], sizes["target"]
        message = f"{names['image']} is {width}×{height} pixels but {names['target']} is {target_width}×{target_height}"
        return Problem(names["image"], SIZES_DIFFER, message)


def _find(split: str, settings: Pairs.Settings) -> tuple[Path, list[Files], list[Problem]]:
    """Return a split's folder, its samples, and the unmatched files."""
    separate = separate_folder(split, settings, SPLIT_NAMES)
    if separate is not None:
        return separate, *_match(separate, settings)
    root = named_root(settings)
    split_root = split_folder(root, split, SPLIT_NAMES)
    base = split_root or root
    samples, problems = _match(base, settings)
    if split_root is None and len(samples) > 1:
        files = [files["image"] for files in samples]
        samples = [samples[index] for index in split_files(settings.group_by, root, files, split)]
    elif split_root is None and samples:
        raise UserError(f"--data-root {root}: one pair is too few to train and test on; add more, or set --test-root")
    return base, samples, problems


def _two_folders(base: Path) -> tuple[Path, Path]:
    for image, target in FOLDERS:
        if (base / image).is_dir() and (base / target).is_dir():
            return base / image, base / target
    expected = " or ".join(f"{image} and {target}" for image, target in FOLDERS)
    raise UserError(f"--data-root {base}: has no folders for inputs and targets; expected {expected}")


def _match(base: Path, settings: Pairs.Settings) -> tuple[list[Files], list[Problem]]:
    """Match files by their path without the suffix; return the pairs and the unmatched files."""
    ends = settings.input_suffix, settings.target_suffix
    if any(ends):
        left, right, problems = by_suffix(base, images_under(base), *ends)
        return [{"image": left[key], "target": right[key]} for key in sorted(left.keys() & right.keys())], problems
    images, targets = _two_folders(base)
    left, right = (by_stem(folder, images_under(folder)) for folder in (images, targets))
    samples = [{"image": left[key], "target": right[key]} for key in sorted(left.keys() & right.keys())]
    alone = [left[key] for key in sorted(left.keys() - right.keys())]
    alone += [right[key] for key in sorted(right.keys() - left.keys())]
    return samples, [Problem.no_counterpart(str(file.relative_to(base))) for file in alone]
