"""A recipe judged on a split: every sample once, whatever the world size."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

from paceline.config.settings import RunSettings
from paceline.contracts.recipe import Batch, Recipe
from paceline.core.heartbeat import beat
from paceline.core.registry import load_class
from paceline.data.draws import Drawer
from paceline.data.feed import drawn_batches, evaluation_batches
from paceline.data.loader import Loader
from paceline.data.pipeline import BatchPipeline
from paceline.evaluation.contract import Case, Evaluator
from paceline.parallel.precision import Precision
from paceline.parallel.world import World
from paceline.runs.finished_run import open_run
from paceline.training.compile import eager
from paceline.training.learner import Learner


class SplitEvaluator:
    """Judges one recipe on one split, as often as asked."""

    def __init__(
        self, recipe: Recipe, loader: Loader, split: str, world: World, precision: Precision, settings: RunSettings
    ) -> None:
        self.recipe, self.loader, self.split = recipe, loader, split
        self.world, self.precision, self.settings = world, precision, settings
        self.pipeline = BatchPipeline(loader, None, precision.weights)
        self.drawer = Drawer(recipe.draws, settings.seed, world.device, precision.weights)
        self.count = (recipe.generates and settings.generated_images) or len(loader.source)

    def prepare(self) -> Evaluator:
        """A judge that is ready to begin: it has its protocol and notes, and has refused what it cannot judge."""
        evaluator: Evaluator = load_class("evaluator", self.recipe.evaluator, Evaluator)(
            self.loader.source.spec, self.world.device, self.settings
        )
        evaluator.begin(Case(self.loader.source, self.split, self.count, open_run, self.recipe.output_scale))
        return evaluator

    @torch.no_grad()
    def measure(self) -> dict[str, float]:
        """The recipe's metrics on the split; the same on every rank."""
        evaluator, world = self.prepare(), self.world
        missing = torch.tensor([float(evaluator.needs_samples)], device=world.device)
        if world.sum(missing).item():  # on any rank: what one host has kept, another may not have
            for batch in self._sample_batches():
                beat()
                evaluator.update_samples(batch)
            evaluator.end_samples(world.sum(evaluator.sample_sums()))
        self.recipe.eval()
        for batch in self._batches():
            beat()
            with eager(), self.precision.autocast():
                prediction = self.recipe.predict(batch)
            evaluator.update(prediction, batch)
        self.recipe.train()
        return evaluator.results(world.sum(evaluator.sums()))

    def _batches(self) -> Iterator[Batch]:
        if self.recipe.generates:
            return drawn_batches(self.drawer, self.count, self.world.rank, self.world.size)
        return self._sample_batches()

    def _sample_batches(self) -> Iterator[Batch]:
        return evaluation_batches(self.pipeline, self.world.rank, self.world.size, self.drawer)


@contextmanager
def evaluated_weights(recipe: Recipe, learners: dict[str, Learner]) -> Iterator[None]:
    """Inside, the networks that are judged through their moving average have it in place."""
    with ExitStack() as stack:
        for name in recipe.ema:
            if name in learners:
                stack.enter_context(learners[name].ema_weights())
        yield
