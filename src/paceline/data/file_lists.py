"""Finds the image files in a folder, pairs and splits them, and formats messages about those that are not used."""

from __future__ import annotations

import itertools
import os
import re
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from paceline.config.settings import RunSettings
from paceline.core.errors import UserError
from paceline.core.files import user_path, write_file
from paceline.core.text import printable
from paceline.images.decode import BadImage
from paceline.images.tiff import TIFF_SUFFIXES

SUFFIXES = {
    *(".jpg", ".jpeg", ".jpe", ".jfif", ".jp2", ".j2k", ".png", ".webp", ".avif", ".bmp", ".gif", *TIFF_SUFFIXES),
    *(".ppm", ".pgm", ".pbm", ".pnm", ".tga", ".qoi"),
}
NOT_SUPPORTED = {".heic", ".heif", ".jxl", ".psd", ".exr", ".dcm", ".dng", ".cr2", ".cr3", ".nef", ".arw"}
HIDDEN = (".", "__")  # name prefixes of hidden files, and of files left behind by file managers and archivers
SPLIT_WORD = re.compile(r"(?i)(?:^|[^a-z])(?:(train)|test|val|valid|dev|eval)(?:ing|idation|uation|set|s)?(?![a-z])")
NOT_USED = "not_used.txt"
MAX_NAMED = 3  # maximum number of files listed in a message


def named_root(settings: RunSettings) -> Path:
    """Return `--data-root` for a source without bundled data; raise UserError if it was not given."""
    root = user_path(settings.data_root)
    if settings.data_root == RunSettings.data_root and not root.exists():
        raise UserError(f"--data {settings.data}: needs --data-root; pass the path to your data")
    return root


@dataclass
class Listing:
    """The visible regular files in a folder, and the entries that cannot be used, each with the reason."""

    files: list[Path] = field(default_factory=list)
    unusable: list[str] = field(default_factory=list)

    @property
    def notes(self) -> tuple[str, ...]:
        """A one-line note about the folder entries that cannot be used; empty if there are none."""
        count = len(self.unusable)
        entries = "1 entry" if count == 1 else f"{count:,} entries"
        return (f"{entries} ignored: {first_few(self.unusable)}",) if count else ()


def list_folder(root: Path, *, recursive: bool = True, for_training: bool = False) -> Listing:
    """List a folder, excluding hidden files and folders; links to files are followed, links to folders are not.

    With `for_training`, images in other formats are unusable.
    """
    listing, folders = Listing(), [root]
    while folders:
        folder = folders.pop()
        try:
            entries = list(os.scandir(folder))
        except OSError as error:
            reason = f"cannot be read ({error.strerror})"
            if folder == root:
                raise UserError(f"{printable(root)}: {reason}") from None
            listing.unusable.append(f"{folder.relative_to(root)}: {reason}")
            continue
        for entry in entries:
            path = Path(entry.path)
            if is_hidden(path):
                continue
            problem = _problem(path, entry)
            if problem == "" and for_training and path.suffix.lower() in NOT_SUPPORTED:
                problem = "format not supported, convert it to PNG or JPEG"
            if problem is None:
                folders += [path] if recursive else []
            elif problem:
                listing.unusable.append(f"{path.relative_to(root)}: {problem}")
            else:
                listing.files.append(path)
    listing.files.sort()
    listing.unusable.sort()
    return listing


def _problem(path: Path, entry: os.DirEntry[str]) -> str | None:
    """Return why a folder entry cannot be used; "" if it is a regular file, None if it is a folder."""
    try:
        if entry.is_dir(follow_symlinks=False):
            return None
        if entry.is_file(follow_symlinks=False):
            return ""
        mode = entry.stat().st_mode
    except OSError as error:
        return f"broken link ({error.strerror})" if path.is_symlink() else f"cannot be read ({error.strerror})"
    if stat.S_ISDIR(mode):
        return "link to a folder"
    return "" if stat.S_ISREG(mode) else "not a regular file"


def no_images(root: Path, listing: Listing, remedy: str = "") -> UserError:
    """Return the error for a folder without images."""
    problem = f"{root}: has no images (supported: {', '.join(sorted(SUFFIXES))})"
    return UserError("; ".join(filter(None, [problem, *listing.notes, remedy])))


def is_image(file: Path) -> bool:
    """Return whether a file name has an image suffix."""
    return file.suffix.lower() in SUFFIXES


def images_under(root: Path, *, recursive: bool = True) -> list[Path]:
    """Return all visible images in a folder and, if it is searched recursively, its subfolders, sorted."""
    return [file for file in list_folder(root, recursive=recursive).files if is_image(file)]


def by_stem(root: Path, files: Iterable[Path]) -> dict[str, Path]:
    """Index files by their relative path without suffix, which is used to match files in two folders."""
    found: dict[str, Path] = {}
    for file in files:
        stem = str(file.relative_to(root).with_suffix(""))
        if stem in found:
            raise UserError(
                f"{printable(found[stem])} and {printable(file.name)}: the names differ only in the suffix; "
                "remove one of the files"
            )
        found[stem] = file
    return found


def by_suffix(
    root: Path, files: Iterable[Path], first: str, second: str
) -> tuple[dict[str, Path], dict[str, Path], list[str]]:
    """Index the files in a folder by their stem without a name suffix, for each of two suffixes.

    If one suffix is empty, it stands for all files without the other suffix. Also return the files with neither.
    """
    if first == second:
        raise UserError(f"both suffixes for matching files are {first!r}; use two different suffixes")
    ends = sorted((first, second), key=len, reverse=True)
    stems: dict[str, list[Path]] = {first: [], second: []}
    problems = []
    for file in files:
        end = next((end for end in ends if file.stem.endswith(end)), None)
        if end is None:
            problems.append(f"{file.relative_to(root)} ends with neither {first} nor {second}")
        else:
            stems[end].append(file)
    left, right = (
        {key.removesuffix(end): file for key, file in by_stem(root, stems[end]).items()} for end in (first, second)
    )
    return left, right, problems


def pair_up(
    root: Path, first: Mapping[str, Path], second: Mapping[str, Path]
) -> tuple[list[tuple[Path, Path]], list[str]]:
    """Return the pairs of files with the same key, and the problems with the other files, such as a missing target."""
    alone = [files[key] for files in (first, second) for key in sorted(first.keys() ^ second.keys()) if key in files]
    pairs = [(first[key], second[key]) for key in sorted(first.keys() & second.keys())]
    return pairs, [f"{file.relative_to(root)} has no counterpart" for file in alone]


def is_hidden(path: Path) -> bool:
    """Return whether a file or folder is hidden, or was left behind by a file manager or an archive."""
    return path.name.startswith(HIDDEN)


def unreadable(place: str | Path, error: BadImage) -> UserError:
    """Return the error for an image that cannot be used, given its path or another description."""
    return UserError(
        f"{printable(place)}: unreadable image ({error}); use --bad-images skip to leave out unreadable files"
    )


def too_small(name: str, size: Iterable[int]) -> str:
    """Return the problem with an image whose height and width are too small for the crop."""
    height, width = size
    return f"{name}: {width}×{height} pixels, smaller than the crop"


def note_left_out(shown: str | Path, problems: Sequence[str], num_left: int) -> str:
    """Return a note about the samples that were left out of a folder."""
    return f"left out {len(problems)} of {num_left + len(problems)} samples in {shown}: {first_few(problems)}"


def check_split_names(root: Path) -> None:
    """Raise UserError if folders have names of splits that are not used as such, like seg_train and seg_test."""
    folders = sorted(entry.name for entry in root.iterdir() if entry.is_dir() and not is_hidden(entry))
    words = {name: word for name in folders if (word := SPLIT_WORD.search(name))}
    if len(words) < len(folders):  # there are others, so that only whole words count
        words = {name: word for name, word in words.items() if word[0] == name}
    train = [name for name, word in words.items() if word[1]]
    held_out = sorted((name for name in words if name not in train), key=lambda name: "test" not in name.lower())
    if len(train) == 1 and held_out:
        named = printable(", ".join(words))
        raise UserError(
            f"--data-root {root}: the folders {named} are not used as splits, which are called train and test; rename "
            f"them, or use --data-root {root / train[0]} --test-root {root / held_out[0]}"
        )


def write_not_used(target: Path, files: Sequence[str]) -> tuple[str, ...]:
    """Write the list of unused files if it is too long to print, and return a message with its path.

    If the list is short, a file left by an earlier command is removed.
    """
    try:
        if len(files) <= MAX_NAMED:
            target.unlink(missing_ok=True)
            return ()
        target.parent.mkdir(parents=True, exist_ok=True)
        write_file(target, "".join(f"{printable(file)}\n" for file in files), durable=False)
    except OSError as error:
        return (f"{printable(target)}: cannot write the list of unused files: {error.strerror}",)
    return (f"all {len(files):,} unused files are listed in {printable(target)}",)


def not_used_file(out: Path) -> Path:
    """Return the path for the list of unused files, alongside a command's `--out`; inside a folder such as `.`."""
    if out.name in ("", ".."):
        return out / f"{out.resolve().name}.{NOT_USED}"
    return out.with_name(f"{out.name}.{NOT_USED}")


def first_few(names: Sequence[str]) -> str:
    """Return the first few names, and how many more there are."""
    more = len(names) - MAX_NAMED
    return ", ".join(map(printable, names[:MAX_NAMED])) + (f" and {more} more" if more > 0 else "")


def existing_folder(root: Path, flag: str) -> Path:
    """Return `root`; raise UserError if it is not a folder. The message refers to `flag`."""
    check_not_a_file(root, flag)
    if not root.is_dir():
        raise UserError(f"{flag} {root}: no such folder")
    return root


def check_not_a_file(root: Path, flag: str) -> None:
    """Raise UserError if `root` is a file, where a folder is needed. The message refers to `flag`."""
    if root.is_file():
        remedy = "use --data npz" if root.suffix.lower() == ".npz" else "use the folder that contains its images"
        raise UserError(f"{flag} {root}: is a file, not a folder; {remedy}")


FOLDERS = (  # of inputs and targets, which `--data pairs` reads
    *(("input", "target"), ("img", "gt"), ("blurry", "sharp"), ("blur", "sharp"), ("noisy", "clean"), ("lq", "gt")),
    *(("hazy", "clear"), ("input", "gt"), ("A", "B")),
)
SCALE = re.compile(r"(?i)[-_]?(?:x\d+|lr|hr|\dx)$")  # 0001x4 is the low-resolution version of 0001
SPLIT = re.compile(r"^(?:train|test|val)_?(?=.)")  # trainA and trainB are A and B of one split
LOW_FOLDER = re.compile(r"(?i)(?:^|[^a-z])lr(?:x?\d|[^a-z]|$)")  # such as LRx4
HIGH_FOLDER = re.compile(r"(?i)(?:^|[^a-z])hr(?:[^a-z]|$)")


def check_independent(root: Path, files: Iterable[Path], flag: str) -> None:
    """Raise UserError if two folders below `root`, the value of `flag`, have the names of inputs and targets.

    At least half of the file names must be the same, without suffixes of the scale as in 0001x4.
    """
    names: dict[Path, set[str]] = {}  # of the files in each folder and its subfolders
    for file in files:
        for folder in file.parents[: len(file.relative_to(root).parts) - 1]:
            names.setdefault(folder, set()).add(SCALE.sub("", str(file.relative_to(folder).with_suffix(""))))
    parents: dict[Path, list[Path]] = {}
    for folder in sorted(names):
        parents.setdefault(folder.parent, []).append(folder)
    for inputs, targets in (pair for siblings in parents.values() for pair in _inputs_and_targets(siblings)):
        if 2 * len(names[inputs] & names[targets]) >= max(len(names[inputs]), len(names[targets])):
            low = f"{flag} {printable(targets)} --{'test-' * (flag == '--test-root')}low-root {printable(inputs)}"
            both = low if LOW_FOLDER.search(inputs.name) else "--data pairs"
            raise UserError(
                f"{flag} {printable(root)}: {printable(inputs)} and {printable(targets)} contain the same images, as "
                f"inputs and targets: use {both} for both, or {flag} {printable(targets)} for one of them"
            )


def _inputs_and_targets(siblings: Sequence[Path]) -> Iterator[tuple[Path, Path]]:
    """Yield the pairs among the subfolders of one folder that have the names of inputs and targets."""
    by_kind = {SPLIT.sub("", folder.name): folder for folder in siblings}
    yield from ((by_kind[first], by_kind[second]) for first, second in FOLDERS if {first, second} <= by_kind.keys())
    low, high = ([folder for folder in siblings if name.search(folder.name)] for name in (LOW_FOLDER, HIGH_FOLDER))
    yield from itertools.product(low, high)


TEST_SHARE = 0.2
SPLIT_KEY = 1797  # must never change: test results are compared between versions


def fixed_split(length: int, split: str) -> NDArray[np.int64]:
    """Return the sorted sample indices of `split`: a fixed random fifth for testing, the rest for training."""
    order = np.random.Generator(np.random.Philox(key=SPLIT_KEY)).permutation(length)
    num_test = max(1, round(length * TEST_SHARE))
    return np.sort(order[-num_test:] if split == "test" else order[:-num_test])


def group_keys(pattern: str, root: Path, files: Sequence[Path]) -> tuple[str, ...]:
    """Return each file's group: the part of its path that the pattern matches.

    If the pattern has capture groups, only the first one counts. Without a pattern, there are no groups.
    """
    if not pattern:
        return ()
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        raise UserError(f"group_by={pattern}: invalid regular expression: {error}") from None
    names = [file.relative_to(root).as_posix() for file in files]
    matches = [compiled.search(name) for name in names]
    keys = [match[min(1, compiled.groups)] if match else None for match in matches]
    unmatched = [name for name, key in zip(names, keys, strict=True) if key is None]
    if unmatched:
        raise UserError(f"group_by={pattern}: must match every file, but does not match {first_few(unmatched)}")
    return tuple(key for key in keys if key is not None)


def held_out(keys: Sequence[str], fraction: float, seed: int) -> NDArray[np.bool_]:
    """Return a mask of the samples to hold out. Whether a group is held out depends only on its own key."""
    numbers = (int.from_bytes(sha256(f"{seed} {key}".encode(errors="surrogateescape")).digest()[:8]) for key in keys)
    return np.fromiter((number < fraction * 2**64 for number in numbers), dtype=bool, count=len(keys))


def split_files(pattern: str, root: Path, files: Sequence[Path], split: str, shown: str) -> NDArray[np.int64]:
    """Return the indices of a split's files. A fifth of the groups, or of ungrouped files, is used for testing.

    `shown` is where the files are, for the error message if there are too few.
    """
    if len(files) < 2:
        raise UserError(f"{shown}: one sample is too few to train and test on; add more, or set --test-root")
    if not pattern:
        return fixed_split(len(files), split)
    keys = group_keys(pattern, root, files)
    tested = held_out(keys, TEST_SHARE, SPLIT_KEY)
    if tested.all() or not tested.any():
        raise UserError(
            f"group_by={pattern}: too few groups ({len(set(keys)):,}) to hold out a fifth for testing; set --test-root"
        )
    return np.flatnonzero(tested if split == "test" else ~tested)
