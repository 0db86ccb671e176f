"""A recipe judged on a source: every sample once, whatever the world size."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

from paceline.data.feed import evaluation_batches
from paceline.data.loader import Loader
from paceline.engine.learner import Learner
from paceline.evaluation._judge import Judge
from paceline.parallel.environment import World
from paceline.parallel.precision import Precision
from paceline.recipe import Recipe
from paceline.registry import load_class


@torch.no_grad()
def evaluate(recipe: Recipe, loader: Loader, world: World, precision: Precision) -> dict[str, float]:
    """The recipe's metrics on a source; the same on every rank."""
    judge: Judge = load_class("judge", recipe.judge, Judge)(loader.source.facts, world.device)
    recipe.eval()
    for batch in evaluation_batches(loader, world.rank, world.size, precision.weights):
        with precision.autocast():
            prediction = recipe.predict(batch)
        judge.update(prediction, batch)
    recipe.train()
    return judge.results(world.sum(judge.sums()))


@contextmanager
def judged_weights(recipe: Recipe, learners: dict[str, Learner]) -> Iterator[None]:
    """Inside, the networks that are judged through their moving average have it in place."""
    with ExitStack() as stack:
        for name in recipe.averaged:
            if name in learners:
                stack.enter_context(learners[name].averaged())
        yield
