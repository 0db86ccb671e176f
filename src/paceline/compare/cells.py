"""The runs in a comparison, trained by it or finished before. Unfinished runs count as failed."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from pathlib import Path

from paceline.compare.grid import Options, PlannedRun
from paceline.config.files import PROVENANCE
from paceline.config.resolve import Config
from paceline.core.errors import UserError
from paceline.core.files import is_folder_locked, parse_toml, read_bounded, read_json, write_json
from paceline.core.registry import is_path, names
from paceline.data.fingerprint import describe_samples, is_same_data
from paceline.data.open_sources import open_sources
from paceline.launch.child import failure_reason, to_arguments
from paceline.report.groups import check_comparable, known_strategy, make_groups, short_names
from paceline.report.model import Cell, Run
from paceline.report.reader import read_run
from paceline.runs.finished_run import last_finished, stages_in, stages_of
from paceline.runs.folder import RunFolder
from paceline.runs.recipe import find_recipe
from paceline.runs.record import CONFIG
from paceline.runs.status import Status
from paceline.runs.weights import is_weights_file

RECORD = "cell.json"  # name of a file in each run's folder


@dataclass(frozen=True)
class CellRecord:
    """The inputs that determine a run in the grid, and how the run was trained."""

    made_from: dict[str, str]
    finished: bool
    side_by_side: bool = False  # whether other runs were trained at the same time, so the run's speed is too low

    @classmethod
    def read(cls, folder: Path) -> CellRecord | None:
        """Return the record in a run's folder, or None if it is missing or cannot be read."""
        content = read_json(folder / RECORD)
        made_from, finished = content.get("made_from"), content.get("finished")
        if not isinstance(made_from, dict) or not isinstance(finished, bool):
            return None
        return cls(made_from, finished, content.get("side_by_side") is True)

    def write(self, folder: Path) -> None:
        """Save the record in a run's folder."""
        write_json(folder / RECORD, asdict(self))


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
    _leave_out_replaced(cells)
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


def _leave_out_replaced(cells: Sequence[Cell]) -> None:
    """Leave out runs that a CPU trained with another strategy than requested, if runs with that one are compared."""
    requested = {cell.name: str(cell.run.settings.get("strategy")) for cell in cells if cell.run}
    as_requested = {cell.strategy for cell in cells if requested[cell.name] in ("auto", cell.strategy)}
    for cell in cells:
        strategy = known_strategy(requested[cell.name])
        obstacle = strategy.why_not("cpu") if strategy else ""
        if cell.state == "done" and obstacle and cell.strategy in as_requested:
            cell.state, cell.reason = "not measured", obstacle


def _check_copies(cells: Sequence[Cell]) -> None:
    """Raise UserError if a run is a copy of another, because the copy would count as an additional seed."""
    for group in make_groups(cells).values():
        by_seed: dict[int, str] = {}
        for seed, folder in zip(group.seeds, group.runs, strict=True):
            if by_seed.setdefault(seed, folder) != folder:
                which = f"{group.strategy}, seed {seed}"
                raise UserError(f"{by_seed[seed]} and {folder}: the same run twice ({which}); leave one out")


# Settings that do not affect a run's results.
IGNORED_SETTINGS = {"out", "preset", "gpus", "keep", "timeout", "join_timeout", "start_timeout"}
IGNORED_SETTINGS |= {"loggers", "logger_wait"}


def made_from(config: Config) -> dict[str, str]:
    """Return the inputs that determine a run: its settings, and hashes of the user's .py files named in them."""
    settings = {name: str(value) for name, value in config.values().items() if name not in IGNORED_SETTINGS}
    plugins = (config.recipe_name, config.run.data, config.run.strategy, config.run.loader)
    files = [Path(name) for name in plugins if is_path(name)]
    return settings | {f"code in {file}": sha256(file.read_bytes()).hexdigest()[:12] for file in files}


def check_kept(folder: Path, planned: Sequence[PlannedRun]) -> None:
    """Raise UserError if the folder contains runs whose settings or data differ from those of the planned runs."""
    known: dict[str, str] = {}
    for one in planned:
        cell, config = one.cell, one.config
        if config is None or not _has_trained(one.folder):
            continue
        record, now = CellRecord.read(one.folder), made_from(config)
        before = record.made_from if record else now
        names = [name for name in dict.fromkeys([*before, *now]) if before.get(name) != now.get(name)]
        if names:
            changes = "; ".join(f"{name}: {before.get(name, 'none')} → {now.get(name, 'none')}" for name in names)
            raise UserError(
                f"--out {folder}: run {cell.name} has different settings ({changes}); choose a different --out"
            )
        _check_data(folder, cell, config, known)


def _check_data(folder: Path, cell: Cell, config: Config, known: dict[str, str]) -> None:
    """Raise UserError if a run was trained on different samples; `known` caches the hashes of the current samples."""
    was = _samples_of(Path(config.run.out))
    if not was:
        return
    if config.recipe_name not in known:
        try:
            known[config.recipe_name] = describe_samples(open_sources(config)["train"])
        except (UserError, OSError):  # finished runs do not need the data; training reports missing data
            known[config.recipe_name] = ""
    now = known[config.recipe_name]
    if now and not is_same_data(was, now):
        problem = f"run {cell.name} was trained on different data ({was} → {now})"
        raise UserError(f"--out {folder}: {problem}; use the same data to resume, or choose a different --out")


def needs_training(planned: PlannedRun) -> bool:
    """Return whether a run still has to be trained; if not, its cell contains the reason."""
    if planned.config is None:
        return False
    record = CellRecord.read(planned.folder)
    if record and record.finished and record.made_from == made_from(planned.config):
        planned.cell.reason = "already finished"
        return False
    return True


def training_arguments(planned: PlannedRun, options: Options, out: str) -> list[str]:
    """Return the arguments of the `paceline` command that trains a run."""
    arguments = ["train", planned.recipe, "--out", out]
    return arguments + to_arguments(planned.flags, options.config_file, options.assignments)


def start_record(planned: PlannedRun) -> None:
    """Record the inputs of a run that is about to be trained."""
    assert planned.config is not None
    if not _has_trained(planned.folder):  # do not add a record to a run that has already been trained
        CellRecord(made_from(planned.config), finished=False).write(planned.folder)


def record_side_by_side(planned: PlannedRun) -> None:
    """Record that a run is being trained at the same time as others."""
    record = CellRecord.read(planned.folder)
    if record and not record.side_by_side:
        replace(record, side_by_side=True).write(planned.folder)


def read_results(planned: PlannedRun, log: Path, exit_code: int = 0) -> None:
    """Read the results of a run whose command has ended, or the reason for its failure."""
    cell, config = planned.cell, planned.config
    if config is None:
        return
    if exit_code:
        cell.state, cell.reason = "failed", failure_reason(log)
        return
    try:
        run = _read_as_planned(config)
    except (OSError, ValueError, LookupError, TypeError) as error:
        known = isinstance(error, UserError)
        cell.state = "failed"
        cell.reason = str(error) if known else f"the run cannot be read: {type(error).__name__}: {error}"
        return
    record = CellRecord.read(planned.folder)
    side_by_side = record is not None and record.side_by_side
    cell.run = replace(run, side_by_side=side_by_side)
    CellRecord(made_from(config), finished=True, side_by_side=side_by_side).write(planned.folder)
    cell.state = "done"


def _has_trained(folder: Path) -> bool:
    return any(RunFolder(run).checkpoints.all() for run in (folder, *stages_in(folder)))


def _samples_of(folder: Path) -> str:
    """Return the description of the training samples that a run or its first stage recorded, or an empty string."""
    for run in (folder, *stages_in(folder)):
        with suppress(OSError, ValueError):  # errors are reported later, when the run is read completely
            provenance = parse_toml(read_bounded(RunFolder(run).config_file)).get(PROVENANCE)
            samples = provenance.get("data") if isinstance(provenance, dict) else None
            if isinstance(samples, str):
                return samples
    return ""


def _read_as_planned(config: Config) -> Run:
    """Return a run (its last stage if it has stages); raise UserError if it is unfinished or has the wrong length."""
    last = stages_of(config)[-1].run
    run, status = read_finished(last.out), Status.of(Path(last.out))
    images = max(RunFolder(Path(last.out)).checkpoints.all(), default=0)
    problem = ""
    if status is None or status.state != "finished":
        problem = f"an unfinished run ({images:,} images so far)"
    elif (run.settings["epochs"], run.settings["images"]) != (last.epochs, last.images):
        problem = f"a run of a different length ({status.total_images:,} images)"
    elif images != status.total_images:
        problem = f"a run that ended after {images:,} of {status.total_images:,} images"
    if problem:
        raise UserError(f"{last.out}: contains {problem}; choose a different --out")
    return run
