"""Matches result files, written by any program, with target files by name."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from paceline.core.errors import UserError

SEPARATORS = "-_. "
SCALE = re.compile(r"(?i)x\d+")  # the result 0001x4 matches the target 0001


def match_files(
    results: Sequence[Path], targets: Sequence[Path], suffix: str = ""
) -> tuple[list[tuple[Path, Path]], list[str]]:
    """Return each result paired with its target, and messages about files without a match.

    Names match if they are equal without file extensions, or if the result's name has one extra word at either end, as
    in `22_2_segmentation` or `sr_castle`. With `suffix`, only results whose names end with it are used.
    """
    if len(results) == len(targets) == 1:
        return [(results[0], targets[0])], []
    results = with_suffix(results, suffix)
    by_stem: dict[str, Path] = {}
    for target in targets:
        if target.stem in by_stem:
            raise UserError(f"{target} and {by_stem[target.stem]}: two targets have the same name; rename one")
        by_stem[target.stem] = target
    pairs: list[tuple[Path, Path]] = []
    problems: list[str] = []
    taken: dict[str, Path] = {}
    for result in results:
        stem = _target_of(result.stem.removesuffix(suffix) if suffix else result.stem, by_stem)
        if not stem:
            problems.append(f"{result}: has no matching target")
        elif stem in taken:
            raise UserError(
                f"{result} and {taken[stem]}: both match {by_stem[stem]}; choose results with --suffix, e.g. "
                f"--suffix {result.stem.removeprefix(stem) or '-sr'}"
            )
        else:
            taken[stem] = result
            pairs.append((result, by_stem[stem]))
    problems += [f"{target}: has no matching result" for stem, target in by_stem.items() if stem not in taken]
    return pairs, problems


def with_suffix(results: Sequence[Path], suffix: str) -> list[Path]:
    """Return the results whose names without the extension end with `suffix`. Raise UserError if there are none."""
    found = [file for file in results if file.stem.endswith(suffix)]
    if not found:
        raise UserError(f"--suffix {suffix}: none of the results has a name that ends with this suffix")
    return found


def _target_of(stem: str, targets: dict[str, Path]) -> str:
    """Return the target name that equals a result's name or is its longest prefix or suffix; "" if there is none."""
    if stem in targets:
        return stem
    found = [target for target in targets if _extends(stem, target)]
    return max(found, key=len, default="")


def _extends(stem: str, target: str) -> bool:
    after, before = stem.removeprefix(target), stem.removesuffix(target)
    starts = after != stem and (after[0] in SEPARATORS or SCALE.fullmatch(after) is not None)
    return starts or (before != stem and before[-1] in SEPARATORS)
