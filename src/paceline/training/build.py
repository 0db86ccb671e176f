"""Build the components of a run from its config: data, recipe, strategy, learners, step."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from paceline.config.resolve import Config
from paceline.config.spans import Span, split_batch
from paceline.contracts.recipe import Recipe
from paceline.core.activity import activity
from paceline.core.errors import UserError
from paceline.data.crop import check_crop, cropped
from paceline.data.draws import Drawer
from paceline.data.feed import Cut, TrainingFeed
from paceline.data.loader import Loader
from paceline.data.loader_choice import choose_loader, choose_loaders
from paceline.data.open_sources import check_evaluated, open_sources
from paceline.data.pipeline import BatchPipeline
from paceline.data.sample_check import check_sample
from paceline.data.source import Source, sizes_of
from paceline.data.tickets import Stream
from paceline.data.transforms import Augment
from paceline.parallel.precision import Precision, choose_precision
from paceline.parallel.strategy import Strategy, strategy_class
from paceline.parallel.world import World, join
from paceline.runs.recipe import make_recipe
from paceline.training.compile import prepare_compiler
from paceline.training.compile_choice import choose_for, compile_and_record
from paceline.training.graph import RunStep, choose_step
from paceline.training.learner import Learner
from paceline.training.schedule import schedule_of
from paceline.training.step import Step


@dataclass
class Parts:
    """The components of a run, on this rank."""

    config: Config
    world: World
    precision: Precision
    strategy: Strategy
    recipe: Recipe
    feed: TrainingFeed
    loaders: dict[str, Loader]  # one loader per split
    step: Step
    run_step: RunStep  # the eager step, or a CUDA graph of it
    epoch_images: int
    total_images: int
    not_used: tuple[str, ...]  # files that no source uses, each with the reason
    notes: list[str]  # choices and the reasons for them, in the order they are printed


def make_loader(source: Source, world: World, config: Config, crop: int = 0) -> Loader:
    """Return the loader that the settings select for a source. With `crop=0`, it loads whole images."""
    return choose_loader(config.run, source, world.device).build(source, world.device, config.run, crop)


def crop_of(config: Config, split: str) -> int:
    """Return the crop size for a split: `crop` for training and for generative recipes, otherwise 0 (no crop)."""
    return config.run.crop if split == "train" or config.recipe_class.generates else 0


def assemble(
    config: Config, world: World | None = None, check: Callable[[Config], None] = lambda config: None
) -> Parts:
    """Build the components of a run. If no world is given, join the other processes first.

    `check` is called with the resolved settings before the networks are compiled, which can take minutes.
    """
    strategy_type = strategy_class(config)
    world = world or join(config.run, distributed=strategy_type.needs_processes)
    try:
        return _build(config, strategy_type, world, check)
    except BaseException:
        world.abandon()
        raise


def _build(config: Config, strategy_type: type[Strategy], world: World, check: Callable[[Config], None]) -> Parts:
    precision = choose_precision(config.run.precision, world.device)
    precision.apply(deterministic=config.run.deterministic)
    if config.run.compile != "off":
        prepare_compiler(world)
    activity(f"opening the data source {config.run.data} and building the networks")
    sources = open_sources(config)
    check_evaluated(config, sources)
    for split, source in sources.items():
        check_sample(source, f"--data {config.run.data}: sample 0 of split {split!r}")
    notes = list(dict.fromkeys(note for source in sources.values() for note in getattr(source, "notes", [])))
    not_used = tuple(dict.fromkeys(file for source in sources.values() for file in getattr(source, "not_used", ())))
    choices, reasons = choose_loaders(config.run, sources, world.device)
    notes += reasons
    train = sources["train"]
    check_crop(sizes_of(train), config.run.crop, train.spec.scale, train.name_of)
    loaders = {
        split: choices[split].build(source, world.device, config.run, crop_of(config, split))
        for split, source in sources.items()
    }
    recipe = make_recipe(config, sources)
    strategy = strategy_type(config.run, world, precision, recipe)
    batch_size = split_batch(config.run.batch_size, strategy.num_devices, config.run.accumulate)
    config = config.with_run(batch_size=str(batch_size), precision=precision.name)
    check(config)
    augment = Augment.from_settings(config.run, cropped(train.spec, config.run.crop))
    pipeline = BatchPipeline(loaders["train"], augment, precision.weights)
    feed = TrainingFeed(
        pipeline,
        Stream(config.run.seed, len(train), train.shuffle),
        Cut(batch_size, config.run.accumulate, world.rank, world.size),
        repeats=max(phase.repeat for phase in recipe.phases),
        drawer=Drawer(recipe.draws, config.run.seed, world.device, precision.weights),
    )
    epoch = len(sources["train"])
    requested = config.run.images or round(config.run.epochs * epoch)
    total = math.ceil(requested / feed.images_per_step) * feed.images_per_step
    learners = make_learners(config, recipe, precision, epoch=epoch, step=feed.images_per_step, total=total)
    step = Step(recipe, learners, strategy, pipeline.finish, batch_size, feed.images_per_step)
    config, compile_notes = _compile(config, step, feed, total)
    notes += compile_notes
    run_step, note = choose_step(step, config.run)
    notes += [note] if note else []
    notes += strategy.notes + _describe(config, strategy, sources, batch_size)
    if augment.flip and config.run.flip == "auto":
        notes.append("augmentation: images are flipped left to right at random; --set flip=off switches this off")
    return Parts(
        config, world, precision, strategy, recipe, feed, loaders, step, run_step, epoch, total, not_used, notes
    )


def _compile(config: Config, step: Step, feed: TrainingFeed, total: int) -> tuple[Config, list[str]]:
    """Resolve `--compile auto`, and compile if it is on; return the config with the choice, and notes about it."""
    notes = []
    if config.run.compile == "auto":
        choice = choose_for(config, step, feed, total // feed.images_per_step)
        config = config.with_run(compile="on" if choice.compiles else "off")
        notes += [choice.note] if choice.note else []
    if config.run.compile == "on":
        activity("compiling the networks, which can take minutes")
        notes.append(compile_and_record(config, step, next(feed.steps(0, feed.images_per_step))))
    return config, notes


def make_learners(
    config: Config, recipe: Recipe, precision: Precision, *, epoch: int, step: int, total: int
) -> dict[str, Learner]:
    """Return a learner for each network of the recipe."""
    lengths: dict[str, Any] = {"epoch": epoch, "step": step, "total": total}
    burn_in = Span.parse(config.run.burn_in, "burn_in").to_images(**lengths)
    learners = {}
    for name, network in recipe.networks.items():
        settings = config.learner_of(name)
        half_life = Span.parse(settings.ema_half_life, "ema_half_life").to_images(**lengths)
        if half_life and name not in recipe.ema:
            if not recipe.ema or "ema_half_life" in config.networks.get(name, {}):
                raise UserError(
                    f"ema_half_life={settings.ema_half_life}: the recipe does not use EMA weights for {name!r}: "
                    "remove the setting"
                )
            half_life = 0
        rate = schedule_of(settings, lr_scale(config), **lengths, burn_in=burn_in)
        learners[name] = Learner(name, network, settings, rate, precision, half_life, burn_in)
    return learners


def lr_scale(config: Config) -> float:
    """Return the factor by which `--scale-lr` multiplies the learning rates."""
    ratio = int(config.run.batch_size) / config.run.reference_batch
    return {"none": 1.0, "linear": ratio, "sqrt": math.sqrt(ratio)}[config.run.scale_lr]


def _describe(config: Config, strategy: Strategy, sources: dict[str, Source], batch: int) -> list[str]:
    networks, device = strategy.recipe.networks, strategy.world.device
    counts = {name: sum(p.numel() for p in network.parameters()) for name, network in networks.items()}
    devices, accumulate = strategy.num_devices, config.run.accumulate
    plural = "device" if devices == 1 else "devices"
    lines = [
        f"data {config.run.data}: " + ", ".join(f"{len(source):,} {split}" for split, source in sources.items()),
        "networks: " + ", ".join(f"{name} {count:,} parameters" for name, count in counts.items()),
        f"batch {batch} = {devices} {plural} × {batch / devices / accumulate:.4g} × {accumulate}",
        f"{strategy.precision.name} on {torch.cuda.get_device_name(device) if device.type == 'cuda' else 'CPU'}",
    ]
    if config.run.scale_lr != "none":
        rates = ", ".join(f"{name} {config.learner_of(name).lr * lr_scale(config):g}" for name in counts)
        lines.append(f"learning rates ({config.run.scale_lr} scaling from batch {config.run.reference_batch}): {rates}")
    return lines
