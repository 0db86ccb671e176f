"""Finds folders with inputs and targets of the same images, where independent images are needed.

Classes may have the same file names, too, so the folders must have names that are usual for pairs, or similar images.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from paceline.core.errors import UserError
from paceline.core.printable import printable
from paceline.images.decode import BadImage, decode
from paceline.images.readers import image_size
from paceline.images.size_limit import unlimited

FOLDERS = (  # of inputs and targets, which `--data pairs` reads
    *(("input", "target"), ("img", "gt"), ("blurry", "sharp"), ("blur", "sharp"), ("noisy", "clean"), ("lq", "gt")),
    *(("hazy", "clear"), ("input", "gt"), ("A", "B")),
)
SCALE = re.compile(r"(?i)[-_]?(?:x\d+|lr|hr|\dx)$")  # 0001x4 is the low-resolution version of 0001
SPLIT = re.compile(r"^(?:train|test|val)_?(?=.)")  # trainA and trainB are A and B of one split
MAX_FOLDERS = 8  # more subfolders are classes or scenes
NUM_COMPARED = 3
THUMBNAIL_PX = 16
SIMILAR = 0.9  # correlation of thumbnails, which is above 0.95 for blurred, noisy and downscaled copies


def check_independent(root: Path, files: Iterable[Path], flag: str) -> None:
    """Raise UserError if some folders below `root`, the value of `flag`, contain inputs and targets."""
    trees: dict[Path, dict[str, dict[str, Path]]] = {}  # files by folder, subfolder, and path without suffix and scale
    for file in files:
        parts = file.relative_to(root).parts
        for depth in range(len(parts) - 1):
            key = "/".join((*parts[depth + 1 : -1], SCALE.sub("", file.stem)))
            trees.setdefault(root.joinpath(*parts[:depth]), {}).setdefault(parts[depth], {})[key] = file
    for folder, subfolders in trees.items():
        if len(subfolders) > MAX_FOLDERS:
            continue
        is_usual = {SPLIT.sub("", name) for name in subfolders} in map(set, FOLDERS)
        order = sorted(subfolders, key=lambda name: ("train" not in name.lower(), name))
        for one, other in itertools.combinations(order, 2):
            scale = _scale(subfolders[one], subfolders[other], is_usual=is_usual)
            if scale:
                turned = (other, one) in FOLDERS if scale == 1 else scale > 1
                inputs, target = (other, one) if turned else (one, other)
                raise _error(root, folder / inputs, folder / target, scale, flag)


def _error(root: Path, inputs: Path, targets: Path, scale: int, flag: str) -> UserError:
    one, other, here = printable(inputs), printable(targets), printable(root)
    both = f"use {flag} {other} --{'test-' * (flag == '--test-root')}low-root {one} for both"
    if scale == 1:
        is_read = inputs.parent == root and (inputs.name, targets.name) in FOLDERS
        move = "" if is_read else f", with these files moved to {here}/input and {here}/target,"
        both = f"use --data pairs{move} for both"
    problem = f"{flag} {here}: {one} and {other} contain the same images, as inputs and targets"
    return UserError(f"{problem}: {both}, or {flag} {other} for one of them")


def _scale(one: dict[str, Path], other: dict[str, Path], *, is_usual: bool) -> int:
    """Return how many times larger the images in `one` are, negative if they are smaller; 0 if they are not pairs."""
    shared = sorted(one.keys() & other.keys())
    if not shared or 2 * len(shared) < max(len(one), len(other)):
        return 0
    keys = [shared[index] for index in np.linspace(0, len(shared) - 1, min(len(shared), NUM_COMPARED)).astype(int)]
    first, second = [one[key] for key in keys], [other[key] for key in keys]
    try:
        sizes = [[np.array(image_size(file, unlimited)) for file in files] for files in (first, second)]
        scales = {_scale_of_sizes(*pair) for pair in zip(*sizes, strict=True)}
        return scales.pop() if len(scales) == 1 and (is_usual or _are_similar(first, second)) else 0
    except BadImage:  # reported when the sample is read
        return 0


def _scale_of_sizes(one: NDArray[np.int64], other: NDArray[np.int64]) -> int:
    if one[0] < other[0]:
        return -_scale_of_sizes(other, one)
    scale = int(one[0] // other[0])
    remainder = one - scale * other
    return scale if remainder.min() >= 0 and remainder.max() < scale else 0


def _are_similar(first: Sequence[Path], second: Sequence[Path]) -> bool:
    """Return whether images resemble their counterparts, and other images less, since classes can look alike."""
    thumbnail = cache(_thumbnail)
    similar = np.array([[float((thumbnail(one) * thumbnail(other)).sum()) for other in second] for one in first])
    to_counterpart, to_others = similar.diagonal(), (similar - 2 * np.eye(len(similar))).max(axis=1)
    return len(similar) > 1 and bool(np.median(to_counterpart) > SIMILAR and (to_counterpart > to_others).all())


def _thumbnail(file: Path) -> NDArray[np.float64]:
    """Return a small image without its mean and of norm 1, so that products are correlations."""
    levels = np.array(decode(file).convert("L").resize((THUMBNAIL_PX, THUMBNAIL_PX)), dtype=np.float64)
    levels -= levels.mean()
    levels /= max(1.0, float(np.linalg.norm(levels)))
    return levels
