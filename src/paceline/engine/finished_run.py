"""A run that others made, opened to use what it learned."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from paceline.config import Config, resolve
from paceline.config_file import read_file
from paceline.engine.assemble import make_recipe, open_sources
from paceline.engine.checkpoint import Checkpoints, Snapshot, load
from paceline.engine.run_folder import RunFolder
from paceline.engine.snapshot import load_weights
from paceline.errors import UserError, unknown
from paceline.evaluation._judge import OpenedRun
from paceline.recipe import Recipe
from paceline.registry import load_class


def config_of(run: str, layers: Iterable[tuple[str, Mapping[str, Any]]] = ()) -> Config:
    """The settings that a run was made with, and what is said on top of them."""
    file = RunFolder(Path(run)).config_file
    if not file.is_file():
        raise UserError(f"{run}: not a run's folder (it has no {file.name})")
    kept = read_file(str(file))
    recipe_class = load_class("recipe", kept["recipe"], Recipe)
    return resolve(kept["recipe"], recipe_class.Settings, [(str(file), kept), *layers])


def choose_checkpoint(checkpoints: Checkpoints, which: str) -> Snapshot:
    """The checkpoint that `best`, `last` or a number of images means."""
    last = checkpoints.latest(print)
    if last is None:
        raise UserError(f"{checkpoints.folder}: has no checkpoint yet")
    if which == "last":
        return last
    if which == "best":
        best = last.numbers.get("best", {}).get("images", last.images)
        return last if best == last.images else load(checkpoints.path(best))
    if not which.isdigit() or int(which) not in checkpoints.all():
        raise unknown("checkpoint", which, ["best", "last", *map(str, checkpoints.all())])
    return load(checkpoints.path(int(which)))


def open_run(run: str) -> OpenedRun:
    """A run with the weights that were judged best, on the CPU."""
    config = config_of(run)
    sources = open_sources(config)
    recipe = make_recipe(config, sources)
    load_weights(recipe, choose_checkpoint(RunFolder(Path(run)).checkpoints, "best").weights, averaged=True)
    return OpenedRun(config, sources["train"].facts, recipe)
