"""`paceline evaluate`: a run's weights measured on any data."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

from paceline.commands.configure import checked
from paceline.config.resolve import Config, Inherited
from paceline.config.source_flags import FOLDERS
from paceline.contracts.recipe import DataSpec
from paceline.core.errors import UserError, unknown
from paceline.core.registry import load_class
from paceline.data.crop import cropped
from paceline.data.open_sources import open_sources
from paceline.data.source import Source
from paceline.launch.tasks import Task, run_in_processes
from paceline.parallel.precision import choose_precision
from paceline.parallel.world import join, place_from
from paceline.runs.data_spec_file import read_data_spec
from paceline.runs.finished_run import choose_checkpoint, config_of
from paceline.runs.folder import RunFolder
from paceline.runs.recipe import make_recipe
from paceline.runs.stages import last_finished
from paceline.runs.weights import load_weights
from paceline.training.build import make_loader
from paceline.training.evaluate import SplitEvaluator


def evaluate(run: str, split: str, flags: dict[str, Any], assignments: dict[str, str], checkpoint: str) -> int:
    """Prints the metrics of a run's checkpoint on a split of its own data or of another source."""
    given, run = {name: value for name, value in flags.items() if value}, last_finished(run)
    # Folders that belong to the run's own data do not belong to another.
    elsewhere = "data_root" in given
    left_behind = FOLDERS if elsewhere else ("test_low_root",)
    own = Inherited(dict.fromkeys(left_behind, "") if elsewhere or "test_root" in given else {})
    config = checked(config_of(run, [("flag", own), ("flag", {"gpus": "", **given}), ("--set", assignments)]))
    config = _measured_whole(config) if elsewhere else config
    recipe_class = config.recipe_class
    if not recipe_class.evaluator:
        raise UserError(f"{run}: recipe {config.recipe_name!r} names no judge, so it cannot be evaluated")
    split = split or (recipe_class.evaluated_on if recipe_class.generates else "test")
    images = choose_checkpoint(RunFolder(Path(run)).checkpoints, checkpoint).images
    if config.run.devices > 1 and place_from(os.environ) is None:
        return run_in_processes(Task.of(evaluate_here, run, split, images), config)
    evaluate_here(config, run, split, images)
    return 0


def _measured_whole(config: Config) -> Config:
    """Return the config under which the folder that was named is measured as a whole, where its source can do that."""
    source_class = load_class("source", config.run.data, Source)
    return dataclasses.replace(config, run=source_class.measure_whole(config.run))


def _other_kind(run: str, here: DataSpec) -> str:
    """In which way the data is not what a run's networks are for, if that is known."""
    learned = read_data_spec(Path(run))
    if learned is None:
        return ""
    if learned.channels != here.channels:
        told = f"its pictures have {here.channels} channel{'s' * (here.channels > 1)}, {run} is for {learned.channels}"
        return f"{told}; use --set channels={learned.channels}"
    if learned.num_classes != here.num_classes:
        return f"it has {here.num_classes} classes and {run} is for {learned.num_classes}; use data with the same ones"
    if (learned.height, learned.width) != (here.height, here.width):
        told = f"its pictures have {here.width}×{here.height} pixels and {run} is for {learned.width}×{learned.height}"
        return f"{told}; use --set size={learned.width}"
    return ""


def _check_class_names(config: Config, run: str, split: str, here: DataSpec) -> None:
    """Refuses as many classes with other names: each would be counted as the one that has its number."""
    learned = read_data_spec(Path(run))
    if learned is None or config.recipe_class.evaluator != "accuracy":
        return
    if not learned.class_names or len(learned.class_names) != len(here.class_names):
        return
    for number, (there, name) in enumerate(zip(learned.class_names, here.class_names, strict=True)):
        if there != name:
            told = f"class {number} of its {split} split is {name!r} and {run} learned {there!r}"
            raise UserError(f"--data {config.run.data}: {told}; use data with the same classes under the same names")


def evaluate_here(config: Config, run: str, split: str, images: int) -> None:
    """This process's part of the measuring."""
    world = join(config.run, distributed=config.run.devices > 1)
    precision = choose_precision(config.run.precision, world.device)
    precision.apply(deterministic=config.run.deterministic)
    sources = open_sources(config, split)
    if split not in sources:
        raise unknown("split", split, sources)
    _check_class_names(config, run, split, sources[split].spec)
    recipe = make_recipe(config, sources)
    snapshot = choose_checkpoint(RunFolder(Path(run)).checkpoints, str(images))
    try:
        load_weights(recipe, snapshot.weights, ema=True)
    except UserError:
        other = _other_kind(run, cropped(sources[split].spec, config.run.crop))
        if other:
            raise UserError(f"--data {config.run.data}: {other}") from None
        raise
    recipe.to(device=world.device, dtype=precision.weights)
    loader = make_loader(sources[split], world, config, config.run.crop if recipe.generates else 0)
    split_evaluator = SplitEvaluator(recipe, loader, split, world, precision, config.run)
    evaluator = split_evaluator.prepare()
    results = split_evaluator.measure()
    loader.close()
    if world.is_first:
        print(f"{config.recipe_name} from {run} at {images:,} images on {split} of {config.run.data}")
        width = max(map(len, results))
        for name, value in results.items():
            print(f"  {name:<{width}}  {value:.8g}")
        if evaluator.protocol():
            print("measured with " + ", ".join(f"{name} {value}" for name, value in evaluator.protocol().items()))
        for note in evaluator.notes:
            print(note)
    world.leave()
