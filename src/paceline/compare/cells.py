"""The runs in a comparison. Each is trained once. Unfinished runs and runs of the wrong length count as failed."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

from paceline.compare.finished import read_finished
from paceline.compare.options import Flags, Options
from paceline.compare.record import CellRecord
from paceline.config.files import PROVENANCE
from paceline.config.resolve import Config
from paceline.core.errors import UserError
from paceline.core.registry import is_path
from paceline.core.small_files import parse_toml, read_bounded
from paceline.data.fingerprint import describe_samples
from paceline.data.open_sources import open_sources
from paceline.launch.child import failure_reason, to_arguments
from paceline.report.model import Cell
from paceline.report.run import Run
from paceline.runs.finished_run import stages_in
from paceline.runs.folder import RunFolder
from paceline.runs.stages import stages_of
from paceline.runs.status import Status

# Settings that do not affect a run's results.
IGNORED_SETTINGS = {"out", "preset", "gpus", "keep", "timeout", "join_timeout", "start_timeout"}
IGNORED_SETTINGS |= {"loggers", "logger_wait"}


class PlannedRun(NamedTuple):
    """A cell of the grid and its run's settings; `config` is None if the run cannot be trained."""

    cell: Cell
    recipe: str
    flags: Flags
    config: Config | None


def made_from(config: Config) -> dict[str, str]:
    """Return the inputs that determine a run: its settings, and hashes of the user's .py files named in them."""
    settings = {name: str(value) for name, value in config.values().items() if name not in IGNORED_SETTINGS}
    plugins = (config.recipe_name, config.run.data, config.run.strategy, config.run.loader)
    files = [Path(name) for name in plugins if is_path(name)]
    return settings | {f"code in {file}": sha256(file.read_bytes()).hexdigest()[:12] for file in files}


def check_kept(folder: Path, planned: Sequence[PlannedRun]) -> None:
    """Raise UserError if the folder contains runs whose settings or data differ from those of the planned runs."""
    known: dict[str, str] = {}
    for cell, _, _, config in planned:
        if config is None or not _has_trained(Path(config.run.out)):
            continue
        record, now = CellRecord.read(Path(config.run.out)), made_from(config)
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
    if now and was != now:
        problem = f"run {cell.name} was trained on different data ({was} → {now})"
        raise UserError(f"--out {folder}: {problem}; use the same data to resume, or choose a different --out")


def needs_training(planned: PlannedRun) -> bool:
    """Return whether a run still has to be trained; if not, its cell contains the reason."""
    cell, _, _, config = planned
    if config is None:
        return False
    record = CellRecord.read(Path(config.run.out))
    if record and record.finished and record.made_from == made_from(config):
        cell.reason = "already finished"
        return False
    return True


def training_arguments(planned: PlannedRun, options: Options) -> list[str]:
    """Return the arguments of the `paceline` command that trains a run."""
    assert planned.config is not None
    arguments = ["train", planned.recipe, "--out", planned.config.run.out]
    return arguments + to_arguments(planned.flags, options.config_file, options.assignments)


def start_record(planned: PlannedRun) -> None:
    """Record the inputs of a run that is about to be trained."""
    assert planned.config is not None
    folder = Path(planned.config.run.out)
    if not _has_trained(folder):  # do not add a record to a run that has already been trained
        CellRecord(made_from(planned.config), finished=False).write(folder)


def record_side_by_side(planned: PlannedRun) -> None:
    """Record that a run is being trained at the same time as others."""
    assert planned.config is not None
    folder = Path(planned.config.run.out)
    record = CellRecord.read(folder)
    if record and not record.side_by_side:
        replace(record, side_by_side=True).write(folder)


def read_results(planned: PlannedRun, log: Path, exit_code: int = 0) -> None:
    """Read the results of a run whose command has ended, or the reason for its failure."""
    cell, _, _, config = planned
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
    record = CellRecord.read(Path(config.run.out))
    side_by_side = record is not None and record.side_by_side
    cell.run = replace(run, side_by_side=side_by_side)
    CellRecord(made_from(config), finished=True, side_by_side=side_by_side).write(Path(config.run.out))
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
