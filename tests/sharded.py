"""Functions that tests of strategies run in several ranks, and in one process for comparison."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from paceline.commands.configure import configure
from paceline.commands.verify import trace_strategy
from paceline.contracts.recipe import Loss, Phase
from paceline.core.errors import UserError
from paceline.core.types import SettingValue
from paceline.parallel.strategies.fsdp import FullyShardedDataParallel
from paceline.runs.recipe import make_recipe
from paceline.training.build import Parts, assemble
from paceline.training.learner import Learner

Case = tuple[str, dict[str, SettingValue]]  # a recipe and its settings


def trace_all(folder: str, cases: dict[str, Case], strategy: str, steps: int, control: str = "") -> None:
    """Train each case in float64 under a strategy and write its gradients and weights to FOLDER/NAME.STRATEGY.

    `control` is a deliberate fault, as in `paceline verify --control`.
    """
    for name, (recipe, settings) in cases.items():
        flags: dict[str, Any] = {"accelerator": "cpu", **settings}
        config = configure(recipe, flags, small=True).with_run(precision="fp64", strategy=strategy)
        trace_strategy(config, str(Path(folder) / f"{name}.{strategy}"), control, steps)


def overflow_once(recipe: str) -> None:
    """Make a gradient infinite in the last process only; print the weights before and after, and the loss scale."""
    parts = assemble(configure(recipe, {"accelerator": "cpu", "precision": "fp16", "strategy": "fsdp"}))
    parts.recipe.train()

    def spoil(phase: Phase, learner: Learner) -> None:
        if parts.world.rank == parts.world.size - 1:
            next(p.grad for p in learner.parameters if p.grad.to_local().numel()).to_local().fill_(torch.inf)

    before = _weights(parts)
    for data in parts.feed.steps(0, parts.feed.images_per_step):
        parts.step(data, watch=spoil)
    print(before, _weights(parts), parts.step.learners["classifier"].scaler.get_scale(), sep="\n")
    parts.world.leave()


def _weights(parts: Parts) -> list[float]:
    return [rows.double().sum().item() for rows in parts.step.learners["classifier"].rows.values()]


def print_errors(recipe: str) -> None:
    """Print why some variants of a recipe cannot be sharded or trained."""
    config = configure(recipe, {"accelerator": "cpu", "strategy": "fsdp"})
    parts = assemble(config)
    for spoil in (_penalise_all, _add_scalar, _add_empty, _tie_networks):
        made = make_recipe(config, {"train": parts.loaders["train"].source})
        spoil(made)
        try:
            FullyShardedDataParallel(config.run, parts.world, parts.precision, made)
        except UserError as error:
            print(error)
    (data,) = parts.feed.steps(0, parts.feed.images_per_step)
    batch = parts.step.finish(data.fetched[0][0])
    first, _, penalty = parts.recipe.phases
    for spoil, phase in ((_use_layer, first), (_decay_weight, first), (_hide_penalty, penalty)):
        made = make_recipe(config, {"train": parts.loaders["train"].source})
        spoil(made)
        strategy = FullyShardedDataParallel(config.run, parts.world, parts.precision, made)
        strategy.trainable.select(phase.network)
        try:
            loss = strategy.forward(phase, {**batch, "fake": batch["image"]})
            strategy.backward(sum(loss.terms.values()), last=True)  # type: ignore[arg-type]
        except UserError as error:
            print(error)
    parts.world.leave()


def print_cast_caching(recipe: str) -> None:
    """Print whether autocast keeps cast weights while each part of the network runs, in bf16."""
    parts = assemble(configure(recipe, {"accelerator": "cpu", "precision": "bf16", "strategy": "fsdp"}))
    found: set[bool] = set()
    hook: Any = lambda *_: found.add(torch.is_autocast_cache_enabled())  # noqa: E731
    for module in parts.recipe.modules():
        module.register_forward_hook(hook)
    for data in parts.feed.steps(0, parts.feed.images_per_step):
        parts.step(data)
    print(sorted(found))
    parts.world.leave()


def _use_layer(recipe: Any) -> None:
    recipe.generator_loss = lambda batch: Loss({"x": recipe.generator[0](batch["noise"]).mean()})


def _decay_weight(recipe: Any) -> None:
    network = recipe.generator
    decay = lambda: network[0].weight.square().sum()  # noqa: E731
    recipe.generator_loss = lambda batch: Loss({"x": network(batch["noise"]).mean(), "decay": decay()})


def _hide_penalty(recipe: Any) -> None:
    recipe.double_backward = ()


def _tie_networks(recipe: Any) -> None:
    recipe.critic.tied = recipe.generator[0].weight


def _add_empty(recipe: Any) -> None:
    recipe.generator.empty = nn.Parameter(torch.zeros(0, 3))


def _penalise_all(recipe: Any) -> None:
    recipe.double_backward = ("generator", "critic")


def _add_scalar(recipe: Any) -> None:
    recipe.generator.scale = nn.Parameter(torch.tensor(1.0))
