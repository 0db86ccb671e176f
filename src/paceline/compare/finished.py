"""Read finished runs for a comparison."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from paceline.compare.record import CellRecord
from paceline.core.errors import UserError
from paceline.core.lock import is_folder_locked
from paceline.core.registry import names
from paceline.report.comparable import check_comparable
from paceline.report.groups import make_groups
from paceline.report.labels import short_names
from paceline.report.model import Cell
from paceline.report.run import Run
from paceline.report.run_reader import read_run
from paceline.runs.config import find_recipe
from paceline.runs.folder import RunFolder
from paceline.runs.record import CONFIG
from paceline.runs.stages import last_finished
from paceline.runs.weights_file import is_weights_file


def are_runs(words: Sequence[str]) -> bool:
    """Return whether the arguments are run folders; raise UserError for a mixture of runs and recipes."""
    if not all(words):
        raise UserError("compare: one of the names is empty; list recipes or run folders")
    for word in filter(is_weights_file, words):
        raise UserError(f"{word}: a weights file has no metrics to compare; use its run folder, or `paceline evaluate`")
    folders = [word for word in words if _is_run(word)]
    if folders and len(folders) < len(words):
        other = next(word for word in words if word not in folders)
        raise UserError(f"{other}: not a run folder, but {folders[0]} is one; compare either recipes or runs, not both")
    return bool(folders)


def _is_run(word: str) -> bool:
    """Return whether an argument is a folder; if it is also the name of a recipe, the folder must contain a run."""
    folder = Path(word)
    return folder.is_dir() and (word not in names("recipe") or RunFolder(folder).config_file.is_file())


def finished_cells(folders: Sequence[str], across_recipes: bool) -> list[Cell]:
    """Return one cell of the comparison per run, without duplicates; raise UserError if runs cannot be compared."""
    found: dict[Path, str] = {}  # the given paths, by resolved path
    for path in map(last_finished, folders):
        found.setdefault(Path(path).resolve(), path)
    runs = [_without_wrong_speed(read_finished(path)) for path in found.values()]
    check_comparable(runs, across_recipes)
    labels = short_names([run.folder for run in runs])
    cells = [_cell_of(run, label) for run, label in zip(runs, labels, strict=True)]
    _check_copies(cells)
    return cells


def read_finished(path: str) -> Run:
    """Return a run's results; for a stage, make `init_from` relative to the stage's folder.

    With absolute paths, runs that differ only in their seeds would not be in the same group.
    """
    run = read_run(path)
    start = str(run.settings.get("init_from", ""))
    stages = find_recipe(run.recipe).stages.values()
    if any({Path(start).name, Path(path).name} <= set(folders) for folders in stages):
        return replace(run, settings={**run.settings, "init_from": os.path.relpath(start, path)})
    return run


def without_speed(run: Run) -> Run:
    """Return a run without its speed, because other runs slowed it down."""
    return replace(run, side_by_side=True, speed=None, seconds_per_epoch={}, gpu={}, load_average=None)


def _without_wrong_speed(run: Run) -> Run:
    """Return a run without its speed if `compare --jobs` trained it at the same time as other runs."""
    folder = Path(run.folder)
    records = [CellRecord.read(place) for place in (folder, folder.parent)]  # a stage's record is in the parent folder
    return without_speed(run) if any(record and record.side_by_side for record in records) else run


def _cell_of(run: Run, label: str) -> Cell:
    again = f"{run.folder.rstrip('/')}-again"
    done = run.finished and (bool(run.quality) or run.speed is not None)
    reason = ""
    if not done and is_folder_locked(Path(run.folder)):
        reason = f"still running, {run.images:,} images so far"
    elif not done:
        reason = "no metrics" if run.finished or not run.images else f"stopped at {run.images:,} images"
    return Cell(
        run.folder,
        Path(run.recipe).stem,
        run.strategy,
        run.devices,
        str(run.batch),
        run.seed,
        state="done" if done else "unfinished",
        reason=reason,
        command=f"paceline {shlex.join(['train', run.recipe, '--config', f'{run.folder}/{CONFIG}', '--out', again])}",
        label=label,
        run=run,
    )


def _check_copies(cells: Sequence[Cell]) -> None:
    """Raise UserError if a run is a copy of another, because the copy would count as an additional seed."""
    for group in make_groups(cells).values():
        by_seed: dict[int, str] = {}
        for seed, folder in zip(group.seeds, group.runs, strict=True):
            if by_seed.setdefault(seed, folder) != folder:
                which = f"{group.strategy}, seed {seed}"
                raise UserError(f"{by_seed[seed]} and {folder}: the same run twice ({which}); leave one out")
