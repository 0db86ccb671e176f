"""The runs of a comparison: each is made once, and is the one that was asked for or counts as failed."""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

from rich.status import Status as Shown

from paceline.config.files import MADE_WITH
from paceline.config.resolve import Config
from paceline.core.errors import UserError
from paceline.core.json_file import keep, kept
from paceline.core.registry import is_path
from paceline.core.screen import as_it_is
from paceline.data.fingerprint import describe_samples
from paceline.data.open_sources import open_sources
from paceline.launch.child import last_words, run_paceline
from paceline.report.numbers import Cell
from paceline.report.runs import Run, read_run
from paceline.runs.config import load_recipe
from paceline.runs.finished_run import stages_in
from paceline.runs.folder import RunFolder
from paceline.runs.metrics import METRICS
from paceline.runs.stages import stages_of
from paceline.runs.status import Status

KEPT = "cell.json"  # in a cell's folder: what its run is made from, and whether it has ended
NO_DIFFERENCE = {"out", "preset", "gpus", "keep", "timeout", "join_timeout"}  # settings that touch no number of a run
LAST_BYTES = 4096  # of metrics, which hold the last line


def made_from(config: Config) -> dict[str, str]:
    """What makes a run the one it is: its settings, and what a person's own files among them hold."""
    facts = {name: str(value) for name, value in config.values().items() if name not in NO_DIFFERENCE}
    files = [Path(name) for name in (config.recipe_name, config.run.data) if is_path(name)]
    return facts | {f"code in {file}": sha256(file.read_bytes()).hexdigest()[:12] for file in files}


def check_kept(folder: Path, wanted: Sequence[tuple[Cell, Config | None]]) -> None:
    """Refuses to go on in a folder whose runs are others than those wanted, before any is touched."""
    known: dict[str, str] = {}
    for cell, config in wanted:
        if config is None or not _has_trained(Path(config.run.out)):
            continue
        before, now = _record(config).get("made_from", {}), made_from(config)
        names = [name for name in dict.fromkeys([*before, *now]) if before and before.get(name) != now.get(name)]
        if names:
            told = "; ".join(f"{name}: {before.get(name, 'none')} → {now.get(name, 'none')}" for name in names)
            raise UserError(f"--out {folder}: its run {cell.name} was made otherwise ({told}); name another --out")
        _check_data(folder, cell, config, known)


def _check_data(folder: Path, cell: Cell, config: Config, known: dict[str, str]) -> None:
    """Refuses a run of other samples than a new one would learn from; `known` are these, by recipe."""
    was = _samples_of(Path(config.run.out))
    if not was:
        return
    if config.recipe_name not in known:
        try:
            known[config.recipe_name] = describe_samples(open_sources(config)["train"])
        except (UserError, OSError):  # what is done is compared without its data; training says what it lacks
            known[config.recipe_name] = ""
    now = known[config.recipe_name]
    if now and was != now:
        told = f"its run {cell.name} was made from other data ({was} → {now})"
        raise UserError(f"--out {folder}: {told}; use the same data to go on, or choose another --out")


def run_cell(cell: Cell, config: Config, arguments: Sequence[str], log: Path, shown: Shown | None) -> None:
    """Trains the cell, if it is not there already, and reads what came of it."""
    file, facts = Path(config.run.out) / KEPT, made_from(config)
    if _record(config) == {"made_from": facts, "ended": True}:
        cell.reason = "done before"
    else:
        if not _has_trained(file.parent):  # else the record of what it began with is there, or nobody knows
            keep(file, {"made_from": facts, "ended": False})
        if run_paceline(arguments, log, lambda: _show_progress(shown, cell.name, config)):
            cell.state, cell.reason = "failed", last_words(log)
            return
    try:
        cell.run = _read_as_asked(config)
    except (OSError, ValueError, LookupError, TypeError) as error:
        told = str(error) if isinstance(error, UserError) else f"cannot be read: {type(error).__name__}: {error}"
        cell.state, cell.reason = "failed", told
        return
    keep(file, {"made_from": facts, "ended": True})
    cell.state = "done"


def read_one(path: str) -> Run:
    """A run's numbers; a stage names the one before it as it lies from here, so that seeds still are one group."""
    run = read_run(path)
    start = str(run.settings.get("init_from", ""))
    stages = load_recipe(run.recipe).stages.values()
    if any({Path(start).name, Path(path).name} <= set(names) for names in stages):
        return replace(run, settings=run.settings | {"init_from": os.path.relpath(start, path)})
    return run


def _record(config: Config) -> dict[str, Any]:
    record = kept(Path(config.run.out) / KEPT)
    return record if isinstance(record.get("made_from"), dict) else {}


def _has_trained(folder: Path) -> bool:
    return any(RunFolder(run).checkpoints.all() for run in (folder, *stages_in(folder)))


def _samples_of(folder: Path) -> str:
    """What a cell's run, or its first stage, says of the samples that it learned from, if anything."""
    for run in (folder, *stages_in(folder)):
        with suppress(OSError, ValueError):  # reading the run as a whole tells what is wrong with it
            made_with = tomllib.loads(RunFolder(run).config_file.read_text()).get(MADE_WITH)
            if isinstance(made_with, dict) and isinstance(made_with.get("data"), str):
                return made_with["data"]
    return ""


def _read_as_asked(config: Config) -> Run:
    """The run of a cell, of several stages the last; one of another length, or that is not over, is refused."""
    last = stages_of(config)[-1].run
    run, status = read_one(last.out), Status.of(Path(last.out))
    images = max(RunFolder(Path(last.out)).checkpoints.all(), default=0)
    told = ""
    if status is None or status.state != "finished":
        told = f"{images:,} images that is not finished"
    elif (run.settings["epochs"], run.settings["images"]) != (last.epochs, last.images):
        told = f"{status.total_images:,} images, which is not the length that was asked for"
    elif images != status.total_images:
        told = f"{images:,} images, while {status.total_images:,} were asked for"
    if told:
        raise UserError(f"{last.out} holds a run of {told}; name another --out")
    return run


def _show_progress(shown: Shown | None, name: str, config: Config) -> None:
    """Reads no more than the end of the metrics: the run needs the machine more."""
    if shown is None:
        return
    metrics = Path(stages_of(config)[0].run.out) / METRICS  # of the stage that has begun
    if not metrics.is_file():
        return
    with metrics.open("rb") as file:
        file.seek(max(0, metrics.stat().st_size - LAST_BYTES))
        seen = re.findall(rb'"images": (\d+)', file.read())
    if seen:
        shown.update(as_it_is(f"{name}  {int(seen[-1]):,} images"))
