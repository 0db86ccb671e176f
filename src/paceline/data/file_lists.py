"""Finds the image files in a folder, and pairs of folders with inputs and targets; formats messages about them."""

from __future__ import annotations

import itertools
import os
import re
import stat
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from paceline.config.settings import RunSettings
from paceline.core.errors import UserError
from paceline.core.files import user_path, write_file
from paceline.core.text import printable
from paceline.images.decode import BadImage, unlimited
from paceline.images.deep import image_size
from paceline.images.tiff import TIFF_SUFFIXES

SUFFIXES = {
    *(".jpg", ".jpeg", ".jpe", ".jfif", ".jp2", ".j2k", ".png", ".webp", ".avif", ".bmp", ".gif", *TIFF_SUFFIXES),
    *(".ppm", ".pgm", ".pbm", ".pnm", ".tga", ".qoi"),
}
NOT_SUPPORTED = {".heic", ".heif", ".jxl", ".psd", ".exr", ".dcm", ".dng", ".cr2", ".cr3", ".nef", ".arw"}
HIDDEN = (".", "__")  # name prefixes of hidden files, and of files left behind by file managers and archivers
VALIDATION_NAMES = ("val", "valid", "validation", "valA", "validA")  # names of validation folders in other projects
SPLIT_WORD = re.compile(r"(?i)(?:^|[^a-z])(?:(train)|test|val|valid|dev|eval)(?:ing|idation|uation|set|s)?(?![a-z])")
ARCHIVE_SUFFIXES = (".zip", ".tar", ".tgz", ".gz", ".bz2", ".xz", ".7z", ".rar")
NOT_USED = "not_used.txt"
MAX_NAMED = 3  # maximum number of files listed in a message


def named_root(settings: RunSettings) -> Path:
    """Return `--data-root` for a source without bundled data; raise UserError if it was not given."""
    root = user_path(settings.data_root)
    if settings.data_root == RunSettings.data_root and not root.exists():
        raise UserError(f"--data {settings.data}: needs --data-root; pass the path to your data")
    return root


class Problem(NamedTuple):
    """A file or sample that cannot be used, and the reason."""

    name: str
    kind: str  # the reason without details, the same for similar problems
    message: str  # the name, and the reason with details

    @classmethod
    def of(cls, name: str, reason: str, kind: str = "") -> Problem:
        """Return a problem with a file or sample. By default, `kind` is the part of the reason before a bracket."""
        return cls(name, kind or without_details(reason), f"{name}: {reason}")


def without_details(reason: str) -> str:
    """Return the part of a reason before the first bracket, which contains details."""
    return reason.partition(" (")[0]


@dataclass
class Listing:
    """The visible regular files in a folder, and the entries that cannot be used, each with the reason."""

    files: list[Path] = field(default_factory=list)
    unusable: list[str] = field(default_factory=list)

    @property
    def notes(self) -> tuple[str, ...]:
        """A one-line note about the folder entries that cannot be used; empty if there are none."""
        count = len(self.unusable)
        if not count:
            return ()
        return (f"{count:,} {'entry' if count == 1 else 'entries'} ignored: {first_few(self.unusable)}",)


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
    return UserError("; ".join([problem, *listing.notes, *([remedy] if remedy else [])]))


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
) -> tuple[dict[str, Path], dict[str, Path], list[Problem]]:
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
            name, kind = str(file.relative_to(root)), f"a name without the suffix {first} or {second}"
            problems.append(Problem(name, kind, f"{name} ends with neither {first} nor {second}"))
        else:
            stems[end].append(file)
    left, right = (
        {key.removesuffix(end): file for key, file in by_stem(root, stems[end]).items()} for end in (first, second)
    )
    return left, right, problems


def pair_up(
    root: Path, first: Mapping[str, Path], second: Mapping[str, Path]
) -> tuple[list[tuple[Path, Path]], list[Problem]]:
    """Return the pairs of files with the same key, and the problems with the other files, such as a missing target."""
    alone = [files[key] for files in (first, second) for key in sorted(first.keys() ^ second.keys()) if key in files]
    names = [str(file.relative_to(root)) for file in alone]
    pairs = [(first[key], second[key]) for key in sorted(first.keys() & second.keys())]
    return pairs, [Problem(name, "no counterpart", f"{name} has no counterpart") for name in names]


def is_hidden(path: Path) -> bool:
    """Return whether a file or folder is hidden, or was left behind by a file manager or an archive."""
    return path.name.startswith(HIDDEN)


def unreadable(place: str | Path, error: BadImage) -> UserError:
    """Return the error for an image that cannot be used, given its path or another description."""
    return UserError(
        f"{printable(place)}: unreadable image ({error}); use --bad-images skip to leave out unreadable files"
    )


def too_small(name: str, size: Iterable[int], crop: int) -> Problem:
    """Return the problem with an image whose height and width are too small for the crop."""
    height, width = size
    return Problem.of(
        name, f"{width}×{height} pixels, smaller than the crop", f"smaller than the crop of {crop}×{crop} pixels"
    )


def unused_validation(root: Path, used: Path) -> tuple[str, ...]:
    """Return a note if a folder has a validation split that is used for neither training nor testing."""
    found = [root / name for name in VALIDATION_NAMES if (root / name).is_dir() and root / name != used]
    hint = "validation samples are held out from the training split (--set validation=FRACTION)"
    return tuple(f"{printable(folder)}: not used; {hint}; to test on this folder, use --test-root" for folder in found)


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


def untrained_classes(labels: NDArray[np.int64], names: Sequence[str]) -> str:
    """Return a text about the classes without a label: how many, and the first few names; "" if there are none."""
    missing = [names[label] for label in np.setdiff1d(np.arange(len(names)), labels)]
    return f"{len(missing)} of {len(names)} classes have no training images ({first_few(missing)})" if missing else ""


def first_messages(problems: Sequence[Problem]) -> str:
    """Return the first few problems with their details, and how many more there are."""
    return first_few([problem.message for problem in problems])


def listed_elsewhere(problems: Sequence[Problem]) -> str:
    """Return the end of an error message: where all problems are listed; "" if the message lists them all itself."""
    return f"; train and pack then list all {len(problems)} in a text file" if len(problems) > MAX_NAMED else ""


def describe_problems(problems: Sequence[Problem]) -> str:
    """Return a few problems with their details; if there are many, their kinds with counts and examples."""
    if len(problems) <= MAX_NAMED:
        return first_messages(problems)
    names: dict[str, list[str]] = {}
    for problem in problems:
        names.setdefault(problem.kind, []).append(problem.name)
    parts = []
    for kind in sorted(names, key=lambda kind: -len(names[kind])):
        examples = ", ".join(
            [*map(printable, names[kind][:MAX_NAMED]), *(["…"] if len(names[kind]) > MAX_NAMED else [])]
        )
        parts.append(f"{len(names[kind]):,} × {printable(kind)} ({examples})")
    return ", ".join(parts)


def existing_folder(root: Path, flag: str) -> Path:
    """Return `root`; raise UserError if it is not a folder. The message refers to `flag`."""
    check_not_a_file(root, flag)
    if not root.is_dir():
        raise UserError(f"{flag} {root}: no such folder")
    return root


def check_not_a_file(root: Path, flag: str) -> None:
    """Raise UserError if `root` is a file, where a folder is needed. The message refers to `flag`."""
    if not root.is_file():
        return
    if root.suffix.lower() == ".npz":
        remedy = "use --data npz"
    elif root.suffix.lower() in ARCHIVE_SUFFIXES:
        remedy = "extract the archive, and use the extracted folder"
    else:
        remedy = "use the folder that contains it"
    raise UserError(f"{flag} {root}: is a file, not a folder; {remedy}")


FOLDERS = (  # of inputs and targets, which `--data pairs` reads
    *(("input", "target"), ("img", "gt"), ("blurry", "sharp"), ("blur", "sharp"), ("noisy", "clean"), ("lq", "gt")),
    *(("hazy", "clear"), ("input", "gt"), ("A", "B")),
)
SCALE = re.compile(r"(?i)[-_]?(?:x\d+|lr|hr|\dx)$")  # 0001x4 is the low-resolution version of 0001
SPLIT = re.compile(r"^(?:train|test|val)_?(?=.)")  # trainA and trainB are A and B of one split
MAX_FOLDERS = 8  # more subfolders are classes or scenes
NUM_COMPARED = 3


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
        for inputs, targets in itertools.permutations(order, 2):
            scale = _scale(subfolders[inputs], subfolders[targets])
            # Files of one size may be numbered alike in any folders.
            if scale > 1 or (scale == 1 and is_usual and (targets, inputs) not in FOLDERS):
                raise _error(root, folder / inputs, folder / targets, scale, flag)


def _error(root: Path, inputs: Path, targets: Path, scale: int, flag: str) -> UserError:
    one, other, here = printable(inputs), printable(targets), printable(root)
    both = f"use {flag} {other} --{'test-' * (flag == '--test-root')}low-root {one} for both"
    if scale == 1:
        is_read = inputs.parent == root and (inputs.name, targets.name) in FOLDERS
        move = "" if is_read else f", with these files moved to {here}/input and {here}/target,"
        both = f"use --data pairs{move} for both"
    problem = f"{flag} {here}: {one} and {other} contain the same images, as inputs and targets"
    return UserError(f"{problem}: {both}, or {flag} {other} for one of them")


def _scale(inputs: Mapping[str, Path], targets: Mapping[str, Path]) -> int:
    """Return how many times larger the targets are than the inputs with the same keys; 0 if they are not pairs."""
    shared = sorted(inputs.keys() & targets.keys())
    if not shared or 2 * len(shared) < max(len(inputs), len(targets)):
        return 0
    keys = [shared[index] for index in np.linspace(0, len(shared) - 1, min(len(shared), NUM_COMPARED)).astype(int)]
    try:
        small, large = (np.array([image_size(files[key], unlimited) for key in keys]) for files in (inputs, targets))
    except BadImage:  # reported when the sample is read
        return 0
    scale = int(large[0, 0] // small[0, 0])
    remainder = large - scale * small
    return scale if remainder.min() >= 0 and remainder.max() < scale else 0
