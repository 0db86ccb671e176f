"""`--compile auto`: compile the networks if this saves more time over the whole run than it costs.

The choice is made once per run and stored in its settings, so that a resumed run keeps it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import torch

from paceline.config.resolve import Config
from paceline.contracts.recipe import Batch, Phase
from paceline.core.garbage import collecting_rarely
from paceline.data.feed import StepData, TrainingFeed
from paceline.parallel.batchnorm import is_synchronized
from paceline.parallel.world import World
from paceline.runs.compile_table import CompileCost, compile_cost, record_seconds
from paceline.runs.folder import RunFolder
from paceline.runs.mirror.session import published_record
from paceline.training.compile import compilable_networks, compile_obstacle, is_compiled, keeping_buffers, try_compile
from paceline.training.compiled_before import marker_of, recorded_time, remember, remember_time, was_compiled
from paceline.training.step import Step

SYNCHRONIZED = "synchronised BatchNorm would split the networks into parts that are too small to benefit"
NUM_TIMED = 3  # steps; the fastest counts
BLOCKER_SIZE, NUM_BLOCKERS = 4096, 64  # matrix products that keep the GPU busy while the host launches a step


@dataclass(frozen=True)
class Choice:
    """Whether to compile, and a line that explains why."""

    compiles: bool
    note: str


def choose(num_steps: int, step_seconds: float, num_networks: int, cost: CompileCost) -> Choice:
    """Weigh the time that compiled networks save over a run against the time that compiling takes."""
    run = num_steps * step_seconds
    saved, spent = cost.gain * run, cost.seconds_per_network * num_networks
    compiles = saved > spent
    outcome, compared = ("on", "more than") if compiles else ("off", "not more than")
    known = " with the kernels of an earlier run" if cost.known else ""
    return Choice(
        compiles,
        f"compile: {outcome} (auto), since it would save about {_seconds(saved)} of {_seconds(run)}, {compared} the "
        f"{_seconds(spent)} that it takes{known} ({cost.origin}; --compile on or off overrides this)",
    )


def choose_for(config: Config, step: Step, feed: TrainingFeed, num_steps: int) -> Choice:
    """Choose for a run. Measure its step on the GPU unless the choice is obvious. Rank 0 chooses for all ranks."""
    if step.world.device.type != "cuda":
        return Choice(False, "")
    if config.run.deterministic:
        return Choice(False, "compile: off (auto), since --deterministic is set; use --compile on to compile anyway")
    if obstacle := compile_obstacle(step):
        return Choice(False, f"compile: off (auto), since {obstacle}")
    if all(map(is_synchronized, compilable_networks(step.recipe))):
        return Choice(False, f"compile: off (auto), since {SYNCHRONIZED}; use --compile on to compile anyway")
    choice = step.world.broadcast(_choose_by_time(config, step, feed, num_steps))
    assert isinstance(choice, Choice)
    return choice


def _choose_by_time(config: Config, step: Step, feed: TrainingFeed, num_steps: int) -> Choice:
    data = next(feed.steps(0, feed.images_per_step))
    networks = compilable_networks(step.recipe)
    marker = marker_of(config, networks, data.fetched[0][0])
    recorded = step.world.broadcast(recorded_time(marker))  # all ranks measure, or none
    try:
        seconds = recorded if isinstance(recorded, float) and recorded else time_step(step, data.fetched[0][0])
    except torch.OutOfMemoryError:
        seconds = None
    if seconds is None:  # outside the handler, which keeps the activations; the first step explains such an error
        for learner in step.learners.values():
            learner.clear_gradients()
        torch.cuda.empty_cache()
        return Choice(False, "compile: off (auto), since the device ran out of memory while a step was timed")
    remember_time(marker, seconds)
    cost = compile_cost(config.recipe_name, known=was_compiled(marker))
    return choose(num_steps, config.run.accumulate * seconds, len(networks), cost)


def compile_and_record(config: Config, step: Step, data: StepData) -> str:
    """Compile the networks, and record how long this took for later choices; return a note."""
    networks = compilable_networks(step.recipe)
    marker = marker_of(config, networks, data.fetched[0][0])  # before compiling changes layers
    known = was_compiled(marker)
    began = time.perf_counter()
    with collecting_rarely():
        note = try_compile(step, data, known=known)
    compiled = [network for network in networks if is_compiled(network)]
    if compiled and step.world.is_first and step.world.device.type == "cuda":
        record_seconds((time.perf_counter() - began) / len(compiled), config.recipe_name, known=known)
        remember(marker)
    return note


def time_step(step: Step, batch: Batch) -> float:
    """Return how many seconds a GPU needs for the forward and backward passes of one micro-batch in an average step.

    Kernels are queued behind other work, so that the GPU's time is measured and not the host's: a captured step does
    not wait for the host.
    """
    device = step.world.device
    matrix = torch.ones(BLOCKER_SIZE, BLOCKER_SIZE, device=device, dtype=torch.bfloat16)
    times: list[float] = []
    with keeping_buffers(step.recipe):
        step.dry_run(dict(batch))
        for _ in range(NUM_TIMED):
            torch.cuda.synchronize(device)
            marks: list[torch.cuda.Event] = []
            for _ in range(NUM_BLOCKERS):
                matrix @ matrix
            step.dry_run(dict(batch), partial(_mark, marks))
            _mark(marks)
            torch.cuda.synchronize(device)
            seconds = [float(start.elapsed_time(end)) / 1000 for start, end in pairwise(marks)]
            times.append(average_seconds(step.recipe.phases, seconds))
    return min(times)


def _mark(marks: list[torch.cuda.Event]) -> None:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    marks.append(event)


def average_seconds(phases: Sequence[Phase], seconds: Sequence[float]) -> float:
    """Return the time of an average step, given the time of each phase; phases may repeat, or not run in every step."""
    return sum(one * phase.repeat / phase.every for phase, one in zip(phases, seconds, strict=True))


def recorded_choice(folder: RunFolder, world: World, resume_from: str = "") -> str:
    """Return what an earlier part of the run chose, "on" or "off", on every rank; empty for a new run.

    The earlier part may be a copy at `--resume-from` that has not been restored yet.
    """
    record = folder.read_record(f"--out {folder.path}") if folder.checkpoints.all() else None
    if record is None and resume_from and world.is_first:
        record = published_record(resume_from)
    value = record.settings.get("compile", "") if record else ""
    text = ("on" if value else "off") if isinstance(value, bool) else str(value)
    found = [one for one in world.gather_strings(text) if one in ("on", "off")]
    return found[0] if found else ""


def _seconds(value: float) -> str:
    return f"{value:.0f} s" if value >= 10 else f"{value:.1f} s"
