"""Build the components of a run from its config: data, recipe, strategy, learners and step."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from paceline.config.resolve import Config
from paceline.config.settings import LearnerSettings, Span, split_batch
from paceline.contracts.recipe import CLASS_DRAW, Clock, DataSpec, Recipe
from paceline.core.errors import UserError, too_few_classes
from paceline.core.host import free_host_bytes, own_host_bytes
from paceline.core.startup import collecting_rarely
from paceline.core.terminal import activity
from paceline.data.loader import BatchPipeline, Cut, Loader, TrainingFeed, choose_loader, choose_loaders
from paceline.data.source import Source, check_evaluated, check_split, open_sources, sizes_of, with_empty_classes
from paceline.data.stream import Augment, Drawer, Stream, check_crop, cropped
from paceline.parallel.precision import Precision, choose_precision
from paceline.parallel.shards import own_rows
from paceline.parallel.strategy import Strategy, num_devices, strategy_class
from paceline.parallel.world import World, join
from paceline.runs.recipe import make_recipe
from paceline.training.compile import choose, prepare_compiler, try_compile
from paceline.training.graph import RunStep, choose_step
from paceline.training.learner import Learner, num_states
from paceline.training.step import Step

LARGE_BYTES = 2**28  # the free memory is looked up each time after so many bytes
FACTORIES = (torch.empty, torch.zeros, torch.ones, torch.rand, torch.randn)


class WeightsLimit(TorchFunctionMode):
    """A context in which a recipe is built: raises UserError before its layers fill the memory."""

    def __init__(self, recipe_name: str) -> None:
        super().__init__()
        self._recipe_name = recipe_name
        self._unchecked = 0  # bytes of new tensors since the free memory was looked up; some may already be released

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        if func in FACTORIES and str(given.get("device")) != "meta":  # a tensor on the device "meta" has no data
            self._unchecked += (size := _bytes_of(args, given))
            if self._unchecked > LARGE_BYTES:
                self._unchecked, free = 0, free_host_bytes()
                if size > free - LARGE_BYTES:
                    raise _too_large(self._recipe_name, "the next layer needs", size, free)
        return func(*args, **given)


def _too_large(recipe_name: str, what: str, size: int, free: int) -> UserError:
    return UserError(
        f"recipe {recipe_name!r}: {what} {size / 1e9:,.1f} GB of memory, but {free / 1e9:.1f} GB is free; "
        "choose a smaller network, for example with fewer channels"
    )


def check_training_fits(config: Config, recipe: Recipe, num_sharing: int) -> None:
    """Raise UserError if a host's memory is too small for what training on the CPU adds to the weights.

    `num_sharing` is the number of processes on the host. The networks are updated one after another, so only the
    largest gradients count.
    """
    gradients, states = [0], 0
    for name, network in recipe.networks.items():
        settings = config.learner_of(name)
        size = sum(own_rows(parameter).nbytes for parameter in network.parameters() if parameter.requires_grad)
        gradients.append(size)
        has_ema = name in recipe.ema and Span.parse(settings.ema_half_life, "ema_half_life").amount > 0
        states += size * (num_states(settings) + has_ema)
    needed = num_sharing * (max(gradients) + states)
    is_known = own_host_bytes() > 0  # otherwise, the free memory is a guess
    if is_known and needed > LARGE_BYTES and needed > (free := free_host_bytes()):
        raise _too_large(config.recipe_name, "gradients, optimizer state and EMA need", needed, free)


def _bytes_of(args: Sequence[Any], given: Mapping[str, Any]) -> int:
    """Return the size of the tensor that a call such as `torch.empty(2, 3)` or `torch.empty((2, 3))` creates."""
    sizes = given.get("size", args)
    if len(sizes) == 1 and isinstance(sizes[0], (tuple, list)):
        sizes = sizes[0]
    dtype: torch.dtype = given.get("dtype") or torch.get_default_dtype()
    return math.prod(map(int, sizes)) * dtype.itemsize


def schedule_of(
    settings: LearnerSettings, scale: float, *, epoch: int, step: int, total: int, burn_in: int = 0
) -> Callable[[int], float]:
    """Return the learning rate as a function of the images seen; `scale` multiplies its peak."""
    to_images = partial(Span.to_images, epoch=epoch, step=step, total=total)
    warmup = to_images(Span.parse(settings.warmup, "warmup"))
    hold = to_images(Span.parse(settings.hold, "hold"))
    milestones = [to_images(Span.parse(text, "milestones")) for text in settings.milestones.split(",")]
    peak = settings.lr * scale

    def after_warmup(images: int) -> float:
        progress = min(1.0, max(0, images - warmup) / max(1, total - warmup))
        match settings.schedule:
            case "cosine":
                return 0.5 * (1 + math.cos(math.pi * progress))
            case "linear":
                return min(1.0, max(0, total - images) / max(1, total - max(hold, warmup)))
            case "step":
                return settings.gamma ** sum(images >= at for at in milestones)
        return 1.0

    def learning_rate(images: int) -> float:
        ramp = images / warmup if images < warmup else 1.0
        rate = peak * ramp * after_warmup(images)
        return rate * Clock(images, step, burn_in).anneal(settings.burn_in_lr, 1.0) if burn_in else rate

    return learning_rate


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

    def trained_spec(self) -> DataSpec:
        """Return the data spec of the training data, with the empty classes if images are generated by class."""
        source = self.loaders["train"].source
        spec = with_empty_classes(source) if CLASS_DRAW in self.recipe.draws else source.spec
        return cropped(spec, self.config.run.crop)


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


def _check_per_class(config: Config, recipe: Recipe, source: Source) -> None:
    """Raise UserError for `per_class` without classes, which would otherwise fail in the first evaluation."""
    if not (config.run.per_class and recipe.generates):
        return
    if source.spec.num_classes < 2:
        raise too_few_classes("per_class", source.spec.num_classes)
    if CLASS_DRAW not in recipe.draws:
        raise UserError("per_class=on: the generator is not conditional on classes; use per_class=off")


def _build(config: Config, strategy_type: type[Strategy], world: World, check: Callable[[Config], None]) -> Parts:
    precision = choose_precision(config.run.precision, world.device)
    precision.apply(deterministic=config.run.deterministic)
    prepare_compiler(world)
    activity(f"opening the data source {config.run.data} and building the networks")
    sources = open_sources(config)
    check_evaluated(config, sources)
    for split, source in sources.items():
        check_split(source, split, f"--data {config.run.data}")
    notes = list(dict.fromkeys(note for source in sources.values() for note in source.notes))
    not_used = tuple(dict.fromkeys(file for source in sources.values() for file in source.not_used))
    choices, reasons = choose_loaders(config.run, sources, world.device)
    notes += reasons
    train = sources["train"]
    check_crop(sizes_of(train), config.run.crop, train.spec.scale, train.name_of)
    loaders = {
        split: choices[split].build(source, world.device, config.run, crop_of(config, split))
        for split, source in sources.items()
    }
    with WeightsLimit(config.recipe_name):
        recipe = make_recipe(config, sources)
    _check_per_class(config, recipe, train)
    strategy = strategy_type(config.run, world, precision, recipe)
    batch_size = split_batch(config.run.batch_size, num_devices(strategy), config.run.accumulate)
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
    epoch = len(train)
    requested = config.run.images or round(config.run.epochs * epoch)
    total = math.ceil(requested / feed.images_per_step) * feed.images_per_step
    if world.device.type == "cpu":
        check_training_fits(config, recipe, world.place.local_size)
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
        compiles, note = choose(config, step, total // feed.images_per_step)
        config = config.with_run(compile="on" if compiles else "off")
        notes += [note] if note else []
    if config.run.compile == "on":
        activity("compiling the networks, which can take minutes")
        with collecting_rarely():
            notes.append(try_compile(step, next(feed.steps(0, feed.images_per_step))))
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
    devices, accumulate = num_devices(strategy), config.run.accumulate
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
