"""Splits that keep all samples in a group, such as crops of one scene, together."""

from __future__ import annotations

import re
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from paceline.core.errors import UserError
from paceline.data.file_lists import first_few
from paceline.data.fixed_split import SPLIT_KEY, TEST_SHARE, fixed_split


def group_keys(pattern: str, root: Path, files: Sequence[Path]) -> tuple[str, ...]:
    """Return each file's group: the part of its path that the pattern matches.

    If the pattern has capture groups, only the first one counts. Without a pattern, there are no groups.
    """
    if not pattern:
        return ()
    try:
        search = re.compile(pattern).search
    except re.error as error:
        raise UserError(f"group_by={pattern}: invalid regular expression: {error}") from None
    names = [file.relative_to(root).as_posix() for file in files]
    found = [search(name) for name in names]
    unmatched = [name for name, match in zip(names, found, strict=True) if not match or match[_group(match)] is None]
    if unmatched:
        raise UserError(f"group_by={pattern}: must match every file, but does not match {first_few(unmatched)}")
    return tuple(match[_group(match)] for match in found if match)


def _group(match: re.Match[str]) -> int:
    return 1 if match.re.groups else 0


def held_out(keys: Sequence[str], fraction: float, seed: int) -> NDArray[np.bool_]:
    """Return a mask of the samples to hold out. Whether a group is held out depends only on its own key."""
    numbers = (int.from_bytes(sha256(f"{seed} {key}".encode(errors="surrogateescape")).digest()[:8]) for key in keys)
    return np.fromiter((number < fraction * 2**64 for number in numbers), dtype=bool, count=len(keys))


def split_files(pattern: str, root: Path, files: Sequence[Path], split: str) -> NDArray[np.int64]:
    """Return the indices of a split's files. A fifth of the groups, or of ungrouped files, is used for testing."""
    if not pattern:
        return fixed_split(len(files), split)
    keys = group_keys(pattern, root, files)
    tested = held_out(keys, TEST_SHARE, SPLIT_KEY)
    if tested.all() or not tested.any():
        number = len(set(keys))
        raise UserError(
            f"group_by={pattern}: too few groups ({number:,}) to hold out a fifth for testing; set --test-root"
        )
    return np.flatnonzero(tested if split == "test" else ~tested)
