"""A run that others made, opened to use what it learned."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from paceline.config.files import read_file
from paceline.config.resolve import Config
from paceline.core.errors import UserError
from paceline.data.crop import cropped
from paceline.data.open_sources import open_sources
from paceline.evaluation.contract import OpenedRun
from paceline.runs.checkpoint import choose_checkpoint
from paceline.runs.config import resolve_config
from paceline.runs.folder import RunFolder
from paceline.runs.recipe import make_recipe
from paceline.runs.weights import load_weights

NAMED = 5  # runs of a folder, in one line


def config_of(run: str, layers: Iterable[tuple[str, Mapping[str, Any]]] = (), *, own_source: bool = True) -> Config:
    """The settings that a run was made with, and what is said on top of them; see `resolve`."""
    file = RunFolder(Path(run)).config_file
    if not file.is_file():
        raise UserError(f"{run}: not a run's folder (it has no {file.name}){name_stages(Path(run))}")
    kept = read_file(str(file))
    recipe = kept.get("recipe")
    if not isinstance(recipe, str):
        raise UserError(f"{file}: names no recipe, so {run} is not a run's folder")
    return resolve_config(recipe, [(str(file), kept), *layers], own_source=own_source)


def name_stages(folder: Path) -> str:
    """For the one who named a folder of runs, of several stages or any: what to name instead."""
    runs = stages_in(folder)
    named = ", ".join(map(str, runs[:NAMED])) + (f" and {len(runs) - NAMED} more" if len(runs) > NAMED else "")
    return f"; name one of the runs in it: {named}" if runs else ""


def stages_in(folder: Path) -> list[Path]:
    """The runs that lie in a folder, by name."""
    return sorted(file.parent for file in folder.glob(f"*/{RunFolder(folder).config_file.name}"))


def open_run(run: str) -> OpenedRun:
    """A run with the weights that were judged best, on the CPU."""
    config = config_of(run)
    sources = open_sources(config)
    recipe = make_recipe(config, sources)
    load_weights(recipe, choose_checkpoint(RunFolder(Path(run)).checkpoints, "best").weights, ema=True)
    return OpenedRun(config, cropped(sources["train"].spec, config.run.crop), recipe)
