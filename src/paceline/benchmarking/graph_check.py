"""Part of the self-test: check that a CUDA graph and eager steps produce the same weights in several processes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from paceline.config.resolve import Config
from paceline.parallel.strategy import AUTO
from paceline.parallel.world import World
from paceline.training.build import Parts, assemble
from paceline.training.graph import GraphedStep, RunStep
from paceline.training.step import Step

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
    num_steps = parts.strategy.eager_steps + REPLAYS
    for data in parts.feed.steps(0, num_steps * parts.feed.images_per_step):
        parts.run_step(data)
    for loader in parts.loaders.values():
        loader.close()
    return parts
