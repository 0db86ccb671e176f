"""The whole training step as one CUDA graph: captured once, replayed with new data.

Small steps are limited by kernel launches, not by computation. A replay needs only one launch. Everything that changes
from step to step is in device tensors that are filled before the replay: the fetched batch, its random inputs and the
learning rates. If some phases do not run in every step, there is one graph for each set of phases that run together.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from itertools import chain, islice
from pathlib import Path

import torch

from paceline.config.settings import RunSettings
from paceline.contracts.recipe import Batch, Phase
from paceline.core.errors import UserError
from paceline.core.text import print_line
from paceline.data.loader import StepData
from paceline.parallel.graphed_function import CapturedGraph, end_failed_capture, root_cause
from paceline.parallel.strategy import Strategy
from paceline.runs.provenance import graph_obstacle
from paceline.training.log import Entry
from paceline.training.step import Step

TORCH, OURS = str(Path(torch.__file__).parent), Path(__file__).parents[1]
AROUND_RECIPES = str(OURS / "training"), str(OURS / "parallel")  # Paceline code that calls recipes

RunStep = Callable[[StepData], list[Entry]]
Fetched = list[list[Batch]]


def eager_steps(strategy: Strategy) -> int:
    """Return how many eager steps must precede the capture of a step as a CUDA graph.

    The first step creates the optimizer's state and selects kernels. torch recommends three steps before a capture, and
    DistributedDataParallel requires eleven.
    """
    return 11 if strategy.needs_processes else 3


def choose_step(step: Step, settings: RunSettings) -> tuple[RunStep, str]:
    """Return the eager step or a graphed one, and a note for the user if the choice needs explaining."""
    obstacle = _obstacle(step)
    if settings.graph == "off" or (settings.graph == "auto" and step.world.device.type != "cuda"):
        return step, ""
    if obstacle and settings.graph == "on":
        raise UserError(f"--graph on: {obstacle}; use --graph auto")
    if obstacle:
        return step, f"step: eager, not a CUDA graph ({obstacle})"
    return GraphedStep(step, settings.graph), f"step: one CUDA graph after {eager_steps(step.strategy)} eager steps"


def _obstacle(step: Step) -> str:
    """Return why this step cannot be captured as a CUDA graph here; empty if it can."""
    if step.world.device.type != "cuda":
        return "there is no GPU"
    if obstacle := step.strategy.why_not("capture"):
        return obstacle
    if step.strategy.recomputes:
        return "recomputing activations reads the random state on the host (checkpoint_activations)"
    if step.world.backend == "gloo":
        return "the gloo backend communicates through the host"
    return graph_obstacle(step.world.size, step.world.place.num_nodes) if step.world.size > 1 else ""


class GraphedStep:
    """A step that first runs eagerly, then is captured as a CUDA graph. It stays eager if the capture fails."""

    def __init__(self, step: Step, mode: str = "auto") -> None:
        self.step, self.mode = step, mode
        self.captured: dict[tuple[Phase, ...], CapturedGraph[list[Entry]]] = {}
        self.seen: dict[tuple[Phase, ...], int] = {}
        self.side = torch.cuda.Stream(step.world.device)
        self.failed = False

    @property
    def is_settled(self) -> bool:
        """Whether every set of phases seen so far is captured, or the step stays eager."""
        return self.failed or (bool(self.seen) and self.seen.keys() <= self.captured.keys())

    def __call__(self, data: StepData) -> list[Entry]:
        due = self.step.due(data.images)
        self.step.set_rates(data.images)
        if due not in self.captured and not self.failed:
            self.seen[due] = self.seen.get(due, 0) + 1
            if self.seen[due] <= eager_steps(self.step.strategy):
                return self._run_on_side_stream(due, data.fetched)
            self._capture(due, data.fetched)
        if self.failed:
            return self.step.learn(due, data.fetched)
        return self.captured[due].replay(list(chain.from_iterable(data.fetched)))

    def _run_on_side_stream(self, due: tuple[Phase, ...], fetched: Fetched) -> list[Entry]:
        self.side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.side):
            entries = self.step.learn(due, fetched)
        torch.cuda.current_stream().wait_stream(self.side)
        return entries

    def _capture(self, due: tuple[Phase, ...], fetched: Fetched) -> None:
        pool, stream = torch.cuda.graph_pool_handle(), torch.cuda.current_stream()

        def learn(batches: list[Batch]) -> list[Entry]:
            remaining = iter(batches)
            return self.step.learn(due, [list(islice(remaining, len(some))) for some in fetched])

        try:
            self.captured[due] = CapturedGraph(learn, list(chain.from_iterable(fetched)), pool)
        except RuntimeError as error:
            self.failed = True
            self.captured.clear()
            end_failed_capture(error, stream, pool, self.step.world.device)
            reason = f"{culprit(error)} cannot be captured in a CUDA graph ({first_line(error)})"
            for learner in self.step.learners.values():
                learner.clear_gradients()
            if self.mode == "on":
                raise UserError(f"--graph on: {reason}; use --graph auto") from error
            print_line(f"step: eager from now on, since {reason}")


def culprit(error: BaseException) -> str:
    """Return the innermost function and line outside torch where a step failed."""
    frames = traceback.extract_tb(root_cause(error).__traceback__)
    outside = [frame for frame in frames if not frame.filename.startswith(TORCH)]
    own = [frame for frame in outside if not frame.filename.startswith(AROUND_RECIPES)]
    last = (own or outside or frames)[-1]
    return f"{last.name} ({last.filename}:{last.lineno})"


def first_line(error: BaseException) -> str:
    """Return the first line of the original error's message."""
    return str(root_cause(error)).strip().splitlines()[0]
