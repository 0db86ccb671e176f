"""The self-test of the devices: a timed all-reduce and, on several GPUs, a CUDA graph check."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from paceline.config.resolve import Config
from paceline.core.files import write_json
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
