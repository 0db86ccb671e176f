"""Which pictures are meant, and what the files are called that become of them: nothing is replaced unasked."""

from __future__ import annotations

import glob
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from paceline.core.errors import UserError
from paceline.data.file_lists import SUFFIXES, first_few, images_in, visible_under
from paceline.images.decode import BadImage
from paceline.images.image_file import result_suffix
from paceline.inference.applier import Outcome, Task

# Ways to call a result, shortest first: by the picture's name with its suffix, and below the name of its folder.
NAMINGS = ((False, False), (True, False), (False, True), (True, True))


@dataclass(frozen=True)
class Meant:
    """A picture that somebody named, or whose folder."""

    path: Path
    name: Path  # below the folder that it was found in
    folder: str  # what that folder is called


@dataclass
class Plan:
    """What is to be done, what cannot be, and what a person should know before it begins."""

    tasks: list[Task] = field(default_factory=list)
    problems: list[Outcome] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def plan(
    words: Iterable[str], out: Path, results: Sequence[str], *, overwrite: bool = False, skip_existing: bool = False
) -> Plan:
    """Every picture that is meant, and where what is made of it goes."""
    if out.exists() and not out.is_dir():
        raise UserError(f"--out {out}: is a file; name a folder")
    made = Plan()
    pictures = find_pictures(words, made, out)
    inputs = {one.path.resolve() for one in pictures}
    for one, targets in _name(pictures, out, results, made).items():
        for target in targets.values():
            if target.resolve() in inputs:
                raise UserError(f"--out {out}: {target} is one of the pictures, and would be overwritten; name another")
        made.tasks.append(Task(str(one.path), {result: str(target) for result, target in targets.items()}))
    if skip_existing:
        _skip_existing(made)
    elif not overwrite:
        _refuse_existing(made.tasks, out)
    return made


def find_pictures(words: Iterable[str], made: Plan, out: Path | None = None) -> list[Meant]:
    """The pictures, each once; words that mean none are problems unless no word means any."""
    found: dict[str, Meant] = {}
    others: dict[Path, None] = {}
    in_out = 0
    for word in words:
        try:
            pictures, left_alone = _expand(word, out)
        except BadImage as problem:
            made.problems.append(Outcome(word, problem=str(problem)))
            continue
        for one in pictures:
            found.setdefault(os.path.abspath(one.path), one)
        others.update(dict.fromkeys(left_alone))
        if out and not Path(word).expanduser().is_file():
            in_out += sum(_is_under(one.path, out) for one in pictures)
    if not found:
        raise UserError(f"{made.problems[0].path}: {made.problems[0].problem}")
    if others:
        files = "1 other file" if len(others) == 1 else f"{len(others):,} other files"
        made.notes.append(f"{files} left alone: {first_few([path.name for path in others])}")
    if in_out:
        made.notes.append(f"--out {out}: pictures are taken from it, so the next call would take its results, too")
    return list(found.values())


def _expand(word: str, out: Path | None) -> tuple[list[Meant], list[Path]]:
    """The pictures that a file, a folder or a pattern means, and the other files of a folder."""
    path = Path(word).expanduser()
    if path.is_file():
        return [_alone(path)], []
    if path.is_dir():
        apart = None if out is None or out.resolve() == path.resolve() else out
        inside = [file for file in visible_under(path) if not (apart and _is_under(file, apart))]
        pictures = images_in(inside)
        if not pictures:
            raise BadImage(f"has no pictures ({', '.join(sorted(SUFFIXES))})")
        others = sorted(file for file in set(inside).difference(pictures) if file.is_file())
        return [Meant(file, file.relative_to(path), path.resolve().name) for file in pictures], others
    files = [_alone(Path(match)) for match in sorted(glob.glob(str(path), recursive=True)) if Path(match).is_file()]
    if not files:
        raise BadImage("no such picture or folder")
    return files, []


def _alone(path: Path) -> Meant:
    return Meant(path, Path(path.name), path.parent.resolve().name)


def _is_under(file: Path, folder: Path) -> bool:
    return file.resolve().is_relative_to(folder.resolve())


def _name(pictures: list[Meant], out: Path, results: Sequence[str], made: Plan) -> dict[Meant, dict[str, Path]]:
    """The files of each picture's results, under the shortest name that is no other picture's, too."""
    named: dict[Meant, dict[str, Path]] = {}
    taken: set[Path] = set()
    left = pictures
    for whole_name, in_folder in NAMINGS:
        proposed = {one: _targets(one, out, results, whole_name, in_folder) for one in left}
        counts = Counter(target for targets in proposed.values() for target in targets.values())
        fitting = {
            one: targets
            for one, targets in proposed.items()
            if all(counts[target] == 1 and target not in taken for target in targets.values())
        }
        named |= fitting
        taken.update(target for targets in fitting.values() for target in targets.values())
        left = [one for one in left if one not in fitting]
    for one in left:
        made.problems.append(
            Outcome(str(one.path), problem="another picture has the same name and folder; use another --out for it")
        )
    return {one: named[one] for one in pictures if one in named}


def _targets(one: Meant, out: Path, results: Sequence[str], whole_name: bool, in_folder: bool) -> dict[str, Path]:
    folder = out / one.folder / one.name.parent if in_folder else out / one.name.parent
    stem, suffix = one.name.name if whole_name else one.name.stem, result_suffix(one.path)
    return {result: folder / (f"{stem}-{result}{suffix}" if result else f"{stem}{suffix}") for result in results}


def _refuse_existing(tasks: list[Task], out: Path) -> None:
    there = [target for task in tasks for target in task.targets.values() if os.path.lexists(target)]
    if there:
        more = f" and {len(there) - 1:,} more" if len(there) > 1 else ""
        verb, them = ("are", "them") if more else ("is", "it")
        flags = f"--overwrite replaces {them}, --skip-existing leaves {them}"
        raise UserError(f"--out {out}: {there[0]}{more} {verb} there already; {flags}")


def _skip_existing(made: Plan) -> None:
    """Leaves out the pictures whose results are there, so that a call that was interrupted can go on."""
    left, num_skipped = [], 0
    for task in made.tasks:
        there = [target for target in task.targets.values() if os.path.lexists(target)]
        if not there:
            left.append(task)
        elif len(there) == len(task.targets):
            num_skipped += 1
        else:
            some = f"{there[0]} is there, and others of its results are not; --overwrite makes all again"
            made.problems.append(Outcome(task.path, problem=some))
    made.tasks = left
    if num_skipped:
        pictures, them = ("1 picture", "it") if num_skipped == 1 else (f"{num_skipped:,} pictures", "them")
        made.notes.append(f"{pictures} left out: what is made of {them} is there already")
