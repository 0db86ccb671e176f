"""`paceline evaluate`: compute the metrics of a checkpoint or a weights file."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Container, Iterable, Mapping
from pathlib import Path

from paceline.commands.configure import checked
from paceline.config.flags import FOLDERS, SeparateTestFolder
from paceline.config.resolve import Config, Inherited
from paceline.contracts.recipe import CLASS_DRAW, DataSpec
from paceline.core.errors import UserError, unknown
from paceline.core.registry import load_class
from paceline.core.terminal import Counter, activity
from paceline.core.text import print_line
from paceline.core.types import SettingValue
from paceline.data.image_files import ImageFiles, accepting_huge_images
from paceline.data.source import Source, open_sources, settings_and_splits
from paceline.data.stream import cropped
from paceline.data.worker_pool import reporting_dead_workers
from paceline.evaluation.contract import is_classifier
from paceline.evaluation.protocol import Protocol
from paceline.inference.compare_images import RegionEvaluation, SplitMetrics
from paceline.inference.trained import NO_BLEND, Blend, StoredModel, TrainedModel, load_weights, read_blended, uses_of
from paceline.launch.tasks import Task, run_in_processes
from paceline.parallel.group import place_from
from paceline.parallel.precision import choose_precision
from paceline.parallel.world import World, join
from paceline.runs.checkpoint import choose_checkpoint
from paceline.runs.finished_run import config_of, is_training_data, last_finished
from paceline.runs.folder import RunFolder
from paceline.runs.recipe import Layers, make_recipe
from paceline.runs.weights import check_checkpoint, is_weights_file
from paceline.training.build import make_loader
from paceline.training.evaluate import SplitEvaluator


def print_metrics(
    metrics: Mapping[str, float], protocol: Protocol, notes: Iterable[str], percentages: Container[str] = ()
) -> None:
    """Print one line per metric, then the protocol (the conditions of the measurement) and notes.

    The metrics in `percentages` get a percent sign.
    """
    width = max(map(len, metrics))
    for name, value in metrics.items():
        print_line(f"  {name:<{width}}  {value:.8g}{'%' * (name in percentages)}")
    if protocol:
        print_line("measured with " + ", ".join(f"{name} {value}" for name, value in protocol.items()))
    for note in notes:
        print_line(note)


SPLITS = ("train", "validation", "test")


def evaluate(
    run: str,
    split: str,
    flags: Mapping[str, SettingValue],
    assignments: Mapping[str, str],
    checkpoint: str,
    blend: Blend = NO_BLEND,
) -> int:
    """Print the metrics of a checkpoint or a weights file, on the run's data or on a different source."""
    run = last_finished(run)
    layers: Layers = [("flag", {"gpus": "", **flags}), ("--set", assignments)]
    not_inherited = ("test_low_root",) if "test_root" in flags else ()
    config = checked(config_of(run, [("flag", Inherited(dict.fromkeys(not_inherited, ""))), *layers]))
    elsewhere = "data_root" in {**flags, **assignments}
    if elsewhere:
        # The folders in the run's settings belong to the run's data, so they do not apply to other data.
        other = checked(config_of(run, [("flag", Inherited(dict.fromkeys(FOLDERS, ""))), *layers]))
        whole = _for_whole_folder(other)
        elsewhere = whole == other or not _is_moved(run, config)
        config = whole if elsewhere else config
    recipe_class = config.recipe_class
    if not recipe_class.evaluation.evaluator:
        raise UserError(f"{run}: recipe {config.recipe_name!r} has no evaluator; set `evaluator` in the recipe")
    split = split or _default_split(config, elsewhere)
    check_checkpoint(run, checkpoint)
    if config.run.devices > 1 and place_from(os.environ) is None:
        if not is_weights_file(run):  # all ranks use the same checkpoint, even if the run saves a new one
            checkpoint = str(choose_checkpoint(RunFolder(Path(run)).checkpoints, checkpoint).images)
        return run_in_processes(Task.of(evaluate_here, run, split, checkpoint, *blend), config)
    evaluate_here(config, run, split, checkpoint, *blend)
    return 0


def _is_moved(run: str, config: Config) -> bool:
    """Return whether --data-root has the run's own data; print that it is split as in training."""
    activity(f"comparing {config.run.data_root} with the data of {run}")
    is_moved = is_training_data(run, config)
    place = place_from(os.environ)
    if is_moved and (place is None or place.rank == 0):
        print_line(f"{config.run.data_root}: has the training data of {run}, so it is split as in training")
    return is_moved


def _default_split(config: Config, elsewhere: bool) -> str:
    """Return the test split if the data has one, and otherwise the split that is evaluated during training.

    Generated images are always compared with the latter.
    """
    has_test = elsewhere or "test" in settings_and_splits(config)[1]
    return "test" if has_test and not config.recipe_class.generates else config.recipe_class.evaluation.split


def _for_whole_folder(config: Config) -> Config:
    """Return a config that evaluates on all images in --data-root, if the source supports this."""
    source_class = load_class("source", config.run.data, Source)
    return dataclasses.replace(config, run=source_class.measure_whole(config.run))


def evaluate_here(config: Config, run: str, split: str, checkpoint: str, share: float = 1.0, other: str = "") -> None:
    """Evaluate in this process, alone or as one of several ranks; rank 0 prints the metrics."""
    world = join(config.run, distributed=config.run.devices > 1)
    with world.reporting(), reporting_dead_workers():
        _evaluate(config, world, run, split, checkpoint, Blend(share, other))
    world.leave()


def _evaluate(config: Config, world: World, run: str, split: str, checkpoint: str, blend: Blend) -> None:
    precision = choose_precision(config.run.precision, world.device)
    precision.apply(deterministic=config.run.deterministic)
    stored = read_blended(run, checkpoint, blend)
    activity(f"opening the data source {config.run.data}")
    with accepting_huge_images():
        sources = open_sources(config, split)
    if split not in sources:
        if split in SPLITS:
            raise UserError(
                f"--split {split}: the data has no {split} split; choose from: {', '.join(sorted(sources))}"
            )
        raise unknown("split", split, sources)
    _check_range(stored, run, config.run.data, sources[split].spec)
    # A network that transforms images of any size is built for the size of the training images, not the evaluated ones.
    transforms = "apply" in uses_of(config.recipe_class)
    recipe = make_recipe(config, sources, (stored.spec.height, stored.spec.width) if transforms else None)
    if is_classifier(stored.recipe_class) or CLASS_DRAW in recipe.draws:
        _check_class_names(stored.spec, run, split, config.run.data, sources[split].spec)
    spec = cropped(sources[split].spec, config.run.crop)
    try:
        load_weights(recipe, dataclasses.replace(stored, spec=spec), run)
    except UserError:
        difference = _difference(run, stored.spec, spec)
        if difference:
            raise UserError(f"--data {config.run.data}: {difference}") from None
        raise
    source = sources[split]
    if isinstance(source, ImageFiles) and source.has_huge_images:
        # Traced on the CPU, before the weights move to the device.
        image_model = TrainedModel(recipe, config, stored.spec, stored.origin)
        evaluation = RegionEvaluation(image_model, source, split, world, precision, config.run)
        recipe.to(device=world.device, dtype=precision.weights)
        with Counter(f"evaluating on the {split} split by region (pixels)", evaluation.num_pixels) as counter:
            found = evaluation.measure(counter.update)
        if world.is_first:
            _print(config, stored, split, source, found)
        return
    recipe.to(device=world.device, dtype=precision.weights)
    loader = make_loader(source, world, config, config.run.crop if recipe.generates else 0)
    split_evaluator = SplitEvaluator(recipe, loader, split, world, precision, config.run)
    with Counter(f"evaluating on the {split} split", split_evaluator.count) as counter:
        metrics = split_evaluator.measure(counter.update)
    loader.close()
    if world.is_first:
        texts = {name.removeprefix(f"{split}/"): text for name, text in split_evaluator.texts(metrics).items()}
        found = SplitMetrics(metrics, split_evaluator.protocol, split_evaluator.notes, texts)
        _print(config, stored, split, source, found)


def _print(config: Config, stored: StoredModel, split: str, source: Source, found: SplitMetrics) -> None:
    whole = config.run.test_root if split == "test" and isinstance(config.run, SeparateTestFolder) else ""
    data = f"all samples in {whole} ({config.run.data})" if whole else f"the {split} split of {config.run.data}"
    count = f"{len(source):,} sample{'s' * (len(source) != 1)}"
    print_line(f"{config.recipe_name} from {stored.origin} on {data}: {count}")
    for note in source.notes:
        print_line(note)
    percentages = [name for name in found.metrics if found.texts.get(name, "").endswith("%")]
    print_metrics(found.metrics, found.protocol, found.notes, percentages)


def _check_class_names(trained: DataSpec, run: str, split: str, data: str, spec: DataSpec) -> None:
    """Raise UserError if the class names differ from those of the run.

    Classes are matched by index, so metrics would be wrong if the classes differed.
    """
    if not trained.class_names or len(trained.class_names) != len(spec.class_names):
        return
    for number, (expected, name) in enumerate(zip(trained.class_names, spec.class_names, strict=True)):
        if expected != name:
            what = f"class {number} in the {split} split is {name!r}, but {run} was trained with {expected!r}"
            raise UserError(f"--data {data}: {what}; use data with the same class names")


def _check_range(stored: StoredModel, run: str, data: str, spec: DataSpec) -> None:
    """Raise UserError if equal pixel values would have a different meaning than in training."""
    if stored.spec.value_range != spec.value_range:
        what = f"the images are {spec.pixel_format}, but {run} was trained on {stored.spec.pixel_format}"
        raise UserError(f"--data {data}: {what}; use images with the same pixels and value_range")


def _difference(run: str, trained: DataSpec, spec: DataSpec) -> str:
    """Return why the data does not fit a run's networks, or an empty string if the reason is unknown."""
    sizes = [f"{one.width}×{one.height} pixels" for one in (spec, trained)]
    for what, here, expected, advice in (
        ("channels", spec.channels, trained.channels, f"--set channels={trained.channels}"),
        ("classes", spec.num_classes, trained.num_classes, "data with the same classes"),
        ("size", *sizes, f"--set size={trained.width}"),
    ):
        if here != expected:
            return f"{what} of the images: {here}, but {run} expects {expected}; use {advice}"
    return ""
