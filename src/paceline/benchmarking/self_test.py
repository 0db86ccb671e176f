"""Measurements for `paceline doctor`: a timed all-reduce, a check of CUDA graphs, and the throughput of the loaders."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from itertools import count, pairwise
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from paceline.benchmarking.step_ladder import synchronize
from paceline.config.resolve import Config
from paceline.config.settings import RunSettings, split_batch
from paceline.contracts.recipe import Batch
from paceline.core.errors import UserError
from paceline.core.files import write_json
from paceline.core.registry import load_class, load_classes
from paceline.core.terminal import activity
from paceline.data.loader import BatchPipeline, Loader, choose_loader
from paceline.data.source import Source, sizes_of
from paceline.data.stream import Augment, Stream, check_crop, cropped
from paceline.data.worker_pool import BATCHES_PER_WORKER
from paceline.parallel.strategy import AUTO
from paceline.parallel.world import World, join
from paceline.training.build import Parts, assemble
from paceline.training.graph import GraphedStep, RunStep, eager_steps
from paceline.training.step import Step


class Timing(NamedTuple):
    """Elapsed seconds per function call."""

    median: float
    low: float  # 10th percentile
    high: float  # 90th percentile
    n: int


def measure(function: Callable[[], object], *, device: torch.device, warmup: int = 10, repeats: int = 30) -> Timing:
    """Time individual calls after a warm-up, with CUDA events on a GPU and `perf_counter` on a CPU."""
    assert repeats > 0, repeats
    for _ in range(warmup):
        function()
    seconds = (
        _seconds_by_events(function, device, repeats) if device.type == "cuda" else _seconds_by_clock(function, repeats)
    )
    low, median, high = np.percentile(seconds, [10, 50, 90])
    return Timing(float(median), float(low), float(high), repeats)


def _seconds_by_clock(function: Callable[[], object], repeats: int) -> list[float]:
    seconds = []
    for _ in range(repeats):
        start = perf_counter()
        function()
        seconds.append(perf_counter() - start)
    return seconds


def _seconds_by_events(function: Callable[[], object], device: torch.device, repeats: int) -> list[float]:
    """Time calls with CUDA events; wait for the device only at the end, so that calls are queued as in training."""
    with torch.cuda.device(device):
        torch.cuda.synchronize()
        event = partial(torch.cuda.Event, enable_timing=True)
        marks = [event() for _ in range(repeats + 1)]
        marks[0].record()
        for mark in marks[1:]:
            function()
            mark.record()
        torch.cuda.synchronize()
    return [before.elapsed_time(after) / 1000 for before, after in pairwise(marks)]


REPLAYS = 8  # number of replays after the eager warm-up steps
TOLERANCE = 1e-6  # allowed difference relative to the largest weight, since the order of summation may differ


@dataclass(frozen=True)
class ReplayCheck:
    """Whether steps replayed from a CUDA graph match eager steps, and how much the weights differ."""

    passed: bool
    result: str  # description of the result
    difference: float  # largest difference between weights, relative to the largest weight
    processes: int
    backend: str


def check_replay(config: Config, world: World, capture: Callable[[Step], RunStep] = GraphedStep) -> ReplayCheck:
    """Run the same training steps eagerly and with a CUDA graph in all processes, and compare the weights."""
    strategy = AUTO["several" if world.backend else "one device"]
    settings = config.with_run(strategy=strategy, graph="off", precision="fp32", deterministic=True)
    eager, captured = _train(settings, world, lambda step: step), _train(settings, world, capture)
    failed = isinstance(captured.run_step, GraphedStep) and captured.run_step.failed
    ours = captured.recipe.state_dict()
    theirs = {name: value for name, value in eager.recipe.state_dict().items() if value.is_floating_point()}
    largest = max(float(value.abs().max()) for value in theirs.values())
    distances = torch.stack([(ours[name] - theirs[name]).abs().max().double() for name in theirs])
    worst = distances.max() / largest
    worst = torch.where(worst.isfinite(), worst, torch.inf)
    seen = world.gather(torch.stack([worst, torch.full_like(worst, float(failed))]))
    difference, any_failed = seen.amax(0).tolist()
    result = (
        f"the weights trained with and without a CUDA graph differ by {difference:.1e}, relative to the largest weight"
    )
    return ReplayCheck(
        passed=not any_failed and difference <= TOLERANCE,
        result="the step could not be captured as a CUDA graph" if any_failed else result,
        difference=difference,
        processes=world.size,
        backend=world.backend,
    )


def _train(config: Config, world: World, prepare: Callable[[Step], RunStep]) -> Parts:
    parts = assemble(config, world)
    parts.run_step = prepare(parts.step)
    parts.recipe.train()
    num_steps = eager_steps(parts.strategy) + REPLAYS
    for data in parts.feed.steps(0, num_steps * parts.feed.images_per_step):
        parts.run_step(data)
    for loader in parts.loaders.values():
        loader.close()
    return parts


ALL_REDUCE_MEGABYTES = 45  # size of a ResNet-18's gradients


@dataclass(frozen=True)
class AllReduce:
    """The time that an all-reduce takes, in milliseconds: median, 10th and 90th percentiles over n repeats."""

    milliseconds: float
    low: float
    high: float
    n: int
    backend: str
    processes: int


@dataclass(frozen=True)
class DeviceTest:
    """The combined results from all processes in a self-test."""

    all_reduce: AllReduce
    graph: ReplayCheck | None  # None unless there are several GPUs

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> DeviceTest:
        """Return the result whose fields were written as JSON."""
        graph = values["graph"]
        return cls(AllReduce(**values["all_reduce"]), ReplayCheck(**graph) if graph else None)


def measure_devices(config: Config, path: str) -> None:
    """Run the test in this process; rank 0 writes the result to a JSON file."""
    world = join(config.run, distributed=True)
    tensor = torch.ones(ALL_REDUCE_MEGABYTES * 2**20 // 4, device=world.device)
    timing = measure(lambda: dist.all_reduce(tensor), device=world.device, warmup=3, repeats=10)
    milliseconds = timing.median * 1e3, timing.low * 1e3, timing.high * 1e3
    graph = check_replay(config, world) if world.backend == "nccl" else None
    if world.is_first:
        all_reduce = AllReduce(*milliseconds, timing.n, world.backend, world.size)
        write_json(Path(path), asdict(DeviceTest(all_reduce, graph)))
    world.wait_for_all()
    world.leave()


BLOCKS = 5
BLOCK_SECONDS = 1.0
WARMUP_BATCHES = 8


class LoaderRate(NamedTuple):
    """The images per second of a loader in each block of batches, and the seconds until its first batch."""

    images_per_second: list[float]
    seconds_to_first_batch: float


def measure_loaders(settings: RunSettings, console: Console) -> int:
    """Measure every loader on the training split and print the results; return 1 if no loader worked."""
    device = join(settings, distributed=False).device
    source = load_class("source", settings.data, Source)("train", settings)
    for note in source.notes:
        console.print(note, soft_wrap=True)
    check_crop(sizes_of(source), settings.crop, source.spec.scale, source.name_of)
    batch_size = split_batch(settings.batch_size, 1, 1)
    crop = f", crop {settings.crop}" if settings.crop else ""
    data = f"{settings.data}, {len(source):,} samples, batch {batch_size}{crop}"
    title = f"loading without training: {data}, {device.type}, --workers {settings.workers}"
    table = Table(title=title, title_justify="left")
    for heading in ("loader", "images/s", "low – high", "n", "time to first batch"):
        table.add_column(heading, justify="left" if heading == "loader" else "right", no_wrap=True)
    obstacles = []
    for name in load_classes("loader", Loader):
        activity(f"measuring the loader {name}")
        try:
            rates, first = _measure(name, source, device, settings, batch_size)
        except UserError as error:
            obstacles.append(f"not measured: {error}")
            table.add_row(name, *["–"] * 4)
            continue
        spread = f"{min(rates):,.0f} – {max(rates):,.0f}"
        table.add_row(name, f"{np.median(rates):,.0f}", spread, str(len(rates)), f"{first:.1f} s")
    console.print(table)
    for obstacle in obstacles:
        console.print(obstacle, soft_wrap=True)
    return int(len(obstacles) == table.row_count)


def _measure(name: str, source: Source, device: torch.device, settings: RunSettings, batch_size: int) -> LoaderRate:
    """Measure the throughput of a loader, including augmentation and scaling on the device."""
    augment = Augment.from_settings(settings, cropped(source.spec, settings.crop))
    start = time.perf_counter()
    choice = choose_loader(dataclasses.replace(settings, loader=name), source, device)
    if choice.name != name:
        raise UserError(f"--loader {name}: {choice.reason}")
    loader = choice.build(source, device, settings, settings.crop)
    stream = Stream(0, len(source), source.shuffle)
    tickets = (stream.take(position, position + batch_size) for position in count(step=batch_size))
    batches = BatchPipeline(loader, augment, torch.float32).batches(tickets)
    try:
        next(batches)
        synchronize(device)
        first = time.perf_counter() - start
        for _ in range(WARMUP_BATCHES + BATCHES_PER_WORKER * settings.workers):  # so that no prefetched batch is timed
            next(batches)
        return LoaderRate([_rate(batches, batch_size, device) for _ in range(BLOCKS)], first)
    finally:
        loader.close()


def _rate(batches: Iterator[Batch], batch_size: int, device: torch.device) -> float:
    synchronize(device)
    start, num_images = time.perf_counter(), 0
    while time.perf_counter() - start < BLOCK_SECONDS:
        next(batches)
        num_images += batch_size
        if num_images % (64 * batch_size) == 0:
            synchronize(device)  # the host must not run far ahead of the device
    synchronize(device)
    return num_images / (time.perf_counter() - start)
