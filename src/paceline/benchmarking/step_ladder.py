"""The step ladder: the speed of one device alone, of all devices together, and with each kind of communication added.

All variants are built in the same processes and their blocks of steps alternate, so that a temporary slowdown of the
machine affects all variants.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from paceline.config.resolve import Config
from paceline.config.settings import split_batch
from paceline.contracts.step_ladder import MeasuredRung, StepLadder
from paceline.core.errors import UserError
from paceline.core.files import read_json, write_json
from paceline.core.terminal import activity, counted, end_activity
from paceline.data.loader import StepData
from paceline.launch.tasks import Task, run_in_processes
from paceline.parallel.batchnorm import has_batchnorm, sum_over_processes
from paceline.parallel.group import Place
from paceline.parallel.strategy import AUTO, num_devices, strategy_class
from paceline.parallel.world import World
from paceline.training.build import Parts, assemble
from paceline.training.graph import GraphedStep
from paceline.training.stop import repeat_signal

ROUNDS = 5
NUM_SUMS = 15
BLOCK_SECONDS = 0.25
WARMUP_STEPS = {"cpu": 2, "cuda": 14}  # on a GPU, the CUDA graph is captured after at most 11 eager steps


@dataclass(frozen=True)
class Variant:
    """A variant of the training step that can be timed."""

    name: str
    advance: Callable[[], None]
    images: int  # images per step, across all participating processes
    alone: bool  # whether only rank 0 works while the other ranks wait


def measure_in_processes(task: Callable[[str], Task], config: Config) -> Mapping[str, Any]:
    """Run a measurement in one process per device; return the JSON object that it writes to the path it is given."""
    with tempfile.TemporaryDirectory(prefix="paceline-measured-") as folder:
        path = Path(folder) / "measured.json"
        code = run_in_processes(task(str(path)), config)
        repeat_signal(code)
        if code or not path.is_file():
            raise UserError(f"the measurement failed with exit code {code}; see its output above")
        return read_json(path)


def measure_ladder(config: Config, path: str) -> None:
    """Run the measurement in this process; rank 0 writes the ladder to a JSON file."""
    activity("preparing the measurement")
    target = assemble(config)
    variants = list(_variants(config, target))
    blocks = [steps_per_block(variant, target.world) for variant in variants]
    end_activity()
    seconds: list[list[float]] = [[] for _ in variants]
    for _ in counted(range(ROUNDS), "measuring the training step", ROUNDS):
        for variant, steps, times in zip(variants, blocks, seconds, strict=True):
            times.append(time_block(variant, steps, target.world) / steps)
    if target.world.is_first:
        rungs = tuple(_rung(variant, times) for variant, times in zip(variants, seconds, strict=True))
        batch = int(target.config.run.batch_size)
        ladder = StepLadder(num_devices(target.strategy), batch, rungs, gradient_bytes(target))
        write_json(Path(path), ladder.to_json())
    target.world.wait_for_all()
    target.world.leave()


def _variants(config: Config, target: Parts) -> Iterator[Variant]:
    """Yield the variants, from one device alone up to the complete training step."""
    devices, world = num_devices(target.strategy), target.world
    whole = split_batch(config.run.batch_size, devices, config.run.accumulate)
    if devices == 1:
        yield synthetic("one", target, alone=False)
        yield from_data("loading", target)
        return
    own = World(Place(), world.device)
    single = config.with_run(strategy=AUTO["one device"], devices=1, gpus="", batch_size=str(whole))
    part = single.with_run(batch_size=str(max(1, whole // devices)))
    yield synthetic("one", assemble(single, own), alone=True)
    small = assemble(part, own)
    yield synthetic("part", small, alone=True, times=devices)
    if strategy_class(config).needs_processes:
        yield synthetic("together", small, alone=False, times=devices)
    if isinstance(small.run_step, GraphedStep) and not isinstance(target.run_step, GraphedStep):
        eager = assemble(part.with_run(graph="off"), own)
        yield synthetic("eager", eager, alone=False, times=devices)
    synchronised = config.run.sync_batchnorm != "off" and strategy_class(config).needs_processes
    if synchronised and any(has_batchnorm(network) for network in target.recipe.networks.values()):
        unsynchronised = assemble(config.with_run(sync_batchnorm="off"), world)
        yield synthetic("gradients", unsynchronised, alone=False)
        yield synthetic("batchnorm", target, alone=False)
    else:
        yield synthetic("gradients", target, alone=False)
    yield from_data("loading", target)


def synthetic(name: str, parts: Parts, *, alone: bool, times: int = 1) -> Variant:
    """Return a variant whose steps all use one batch that is already on the device."""
    parts.recipe.train()
    images_per_step = parts.feed.images_per_step
    data = next(parts.feed.steps(0, images_per_step))
    position = 0

    def advance() -> None:
        nonlocal position
        parts.run_step(StepData(position, data.fetched))
        position += images_per_step

    return Variant(name, advance, images_per_step * times, alone)


def from_data(name: str, parts: Parts) -> Variant:
    """Return a variant whose steps load the run's data, as in training."""
    steps = parts.feed.steps(0, 2**62)

    def advance() -> None:
        parts.run_step(next(steps))

    return Variant(name, advance, parts.feed.images_per_step, alone=False)


def steps_per_block(variant: Variant, world: World, block_seconds: float = BLOCK_SECONDS) -> int:
    """Warm up, then return how many steps take about `block_seconds`; the number is the same on all ranks."""
    time_block(variant, WARMUP_STEPS[world.device.type], world)
    seconds = time_block(variant, 2, world) / 2
    steps = world.broadcast(max(1, min(200, round(block_seconds / seconds))))
    assert isinstance(steps, int)
    return steps


def time_block(variant: Variant, steps: int, world: World) -> float:
    """Return how many seconds the slowest process takes to run a given number of steps."""
    world.wait_for_all()
    start = time.perf_counter()
    if world.is_first or not variant.alone:
        for _ in range(steps):
            variant.advance()
        synchronize(world.device)
    spent = torch.tensor([time.perf_counter() - start], dtype=torch.float64, device=world.device)
    world.wait_for_all()
    return world.gather(spent).max().item()


def _rung(variant: Variant, seconds: Sequence[float]) -> MeasuredRung:
    low, median, high = (float(variant.images / s) for s in np.percentile(seconds, [90, 50, 10]))
    return MeasuredRung(variant.name, median, low, high, len(seconds))


def gradient_bytes(parts: Parts) -> dict[str, int]:
    """Return the size of each phase's gradients in bytes."""
    learners = parts.step.learners
    sizes = {name: sum(p.numel() * p.element_size() for p in one.parameters) for name, one in learners.items()}
    return {phase.name: sizes[phase.network] for phase in parts.recipe.phases}


def time_sum(num_bytes: int, world: World) -> float:
    """Return the median time in seconds for summing `num_bytes` across all processes."""
    tensor = torch.zeros(max(1, num_bytes // 4), device=world.device)
    seconds = []
    for _ in range(NUM_SUMS):
        world.wait_for_all()
        start = time.perf_counter()
        sum_over_processes(tensor)
        synchronize(world.device)
        seconds.append(time.perf_counter() - start)
    return float(np.median(seconds))


def synchronize(device: torch.device) -> None:
    """Wait until a GPU has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
