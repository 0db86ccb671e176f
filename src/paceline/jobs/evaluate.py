"""`paceline evaluate`: a run's weights measured on any data."""

from __future__ import annotations

import os
from pathlib import Path

from paceline.config import Config, read_file, resolve
from paceline.engine.assemble import make_loader, make_recipe, open_sources
from paceline.engine.checkpoint import Checkpoints, Snapshot, load
from paceline.engine.evaluation import evaluate as measure
from paceline.engine.run_folder import RunFolder
from paceline.engine.snapshot import load_weights
from paceline.errors import UserError, unknown
from paceline.jobs.configure import checked
from paceline.jobs.worker import run_in_processes
from paceline.parallel.environment import join, place_from
from paceline.parallel.precision import choose_precision
from paceline.recipe import Recipe
from paceline.registry import load_class


def evaluate(run: str, split: str, changes: dict[str, object], checkpoint: str) -> int:
    """Prints the metrics of a run's checkpoint on a split of its own data or of another source."""
    config = config_of(run)
    config = checked(config.with_run(gpus="", **{name: value for name, value in changes.items() if value}))
    images = choose_checkpoint(RunFolder(Path(run)).checkpoints, checkpoint).images
    if config.run.devices > 1 and place_from(os.environ) is None:
        return run_in_processes("evaluate", config, run, split, str(images))
    evaluate_here(config, run, split, str(images))
    return 0


def config_of(run: str) -> Config:
    """The settings that a run was made with."""
    file = RunFolder(Path(run)).config_file
    if not file.is_file():
        raise UserError(f"{run}: not a run's folder (it has no {file.name})")
    kept = read_file(str(file))
    recipe_class = load_class("recipe", kept["recipe"], Recipe)
    return resolve(kept["recipe"], recipe_class.Settings, [(str(file), kept)])


def choose_checkpoint(checkpoints: Checkpoints, which: str) -> Snapshot:
    """The checkpoint that `best`, `last` or a number of images means."""
    last = checkpoints.latest(print)
    if last is None:
        raise UserError(f"{checkpoints.folder}: no checkpoint to evaluate")
    if which == "last":
        return last
    if which == "best":
        best = last.numbers.get("best", {}).get("images", last.images)
        return last if best == last.images else load(checkpoints.path(best))
    if not which.isdigit() or int(which) not in checkpoints.all():
        raise unknown("checkpoint", which, ["best", "last", *map(str, checkpoints.all())])
    return load(checkpoints.path(int(which)))


def evaluate_here(config: Config, run: str, split: str, images: str) -> None:
    """This process's part of the measuring."""
    world = join(config.run, distributed=config.run.devices > 1)
    precision = choose_precision(config.run.precision, world.device)
    precision.apply(deterministic=config.run.deterministic)
    sources = open_sources(config)
    if split not in sources:
        raise unknown("split", split, sources)
    recipe = make_recipe(config, sources)
    load_weights(recipe, choose_checkpoint(RunFolder(Path(run)).checkpoints, images).weights, averaged=True)
    recipe.to(device=world.device, dtype=precision.weights)
    results = measure(recipe, make_loader(sources[split], world, config), world, precision)
    if world.is_first:
        print(f"{config.recipe_name} at {int(images):,} images on {split} of {config.run.data}")
        for name, value in results.items():
            print(f"  {name:<12} {value:.6g}")
    world.leave()
