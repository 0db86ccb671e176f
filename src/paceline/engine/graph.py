"""The whole training step as one CUDA graph: captured once, replayed with new data.

Small steps are bound by launching kernels, not by computing. A replay launches one graph. What changes from
step to step lies in device tensors that are filled before: the fetched batch, the draws, the learning rates.
Phases that do not run in every step make several graphs, one for each set of phases that is due together.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable

import torch

from paceline.data.feed import StepData
from paceline.engine.ledger import Entry
from paceline.engine.step import Step
from paceline.errors import UserError
from paceline.monitor.this_machine import doubt_about_graphs
from paceline.parallel.strategies.dp import DataParallel
from paceline.recipe import Batch, Phase
from paceline.settings import RunSettings

WARMUP_STEPS = 11  # real steps on a side stream before a capture; DistributedDataParallel needs as many

RunStep = Callable[[StepData], list[Entry]]
Fetched = list[list[Batch]]


def choose_step(step: Step, settings: RunSettings) -> tuple[RunStep, str]:
    """The step as it is or as a graph, and a line that says why where a person asked or may wonder."""
    obstacle = _obstacle(step)
    if settings.graph == "off" or (settings.graph == "auto" and step.world.device.type != "cuda"):
        return step, ""
    if obstacle and settings.graph == "on":
        raise UserError(f"--graph on: {obstacle}; use --graph auto")
    if obstacle:
        return step, f"step: eager, not a CUDA graph ({obstacle})"
    return GraphedStep(step), f"step: one CUDA graph after {WARMUP_STEPS} eager steps"


def _obstacle(step: Step) -> str:
    """Why this step cannot be captured here; empty where it can."""
    if step.world.device.type != "cuda":
        return "there is no GPU"
    if isinstance(step.strategy, DataParallel):
        return "DataParallel's threads cannot be captured"
    if step.world.backend == "gloo":
        return "gloo works on the host"
    return doubt_about_graphs(step.world.size, step.world.place.num_nodes) if step.world.size > 1 else ""


class _Captured:
    """One graph, the tensors that it reads and the entries that it writes."""

    def __init__(self, step: Step, due: tuple[Phase, ...], fetched: Fetched) -> None:
        self.inputs: Fetched = [[{k: v.clone() for k, v in batch.items()} for batch in some] for some in fetched]
        self.graph = torch.cuda.CUDAGraph()
        # Other threads (a loader's pinning, a process group's watchdog) may use the device meanwhile.
        with torch.cuda.graph(self.graph, capture_error_mode="thread_local"):
            self.entries = step.learn(due, self.inputs)

    def replay(self, fetched: Fetched) -> list[Entry]:
        """Learns from other data by the same kernels."""
        for inputs, some in zip(self.inputs, fetched, strict=True):
            for static, batch in zip(inputs, some, strict=True):
                torch._foreach_copy_(list(static.values()), [batch[name] for name in static])
        self.graph.replay()
        return self.entries


class GraphedStep:
    """A step that is eager at first, then captured, then replayed; one that cannot be captured stays eager."""

    def __init__(self, step: Step) -> None:
        self.step = step
        self.captured: dict[tuple[Phase, ...], _Captured] = {}
        self.seen: dict[tuple[Phase, ...], int] = {}
        self.side = torch.cuda.Stream(step.world.device)
        self.failed = False

    def __call__(self, data: StepData) -> list[Entry]:
        due = self.step.due(data.images)
        self.step.set_rates(data.images)
        if due not in self.captured and not self.failed:
            self.seen[due] = self.seen.get(due, 0) + 1
            if self.seen[due] <= WARMUP_STEPS:
                return self._on_the_side(due, data.fetched)
            self._capture(due, data.fetched)
        if self.failed:
            return self.step.learn(due, data.fetched)
        return self.captured[due].replay(data.fetched)

    def _on_the_side(self, due: tuple[Phase, ...], fetched: Fetched) -> list[Entry]:
        self.side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.side):
            entries = self.step.learn(due, fetched)
        torch.cuda.current_stream().wait_stream(self.side)
        return entries

    def _capture(self, due: tuple[Phase, ...], fetched: Fetched) -> None:
        try:
            self.captured[due] = _Captured(self.step, due, fetched)
        except RuntimeError as error:
            self.failed = True
            self.captured.clear()
            torch.cuda.synchronize()
            for learner in self.step.learners.values():
                learner.optimizer.zero_grad(set_to_none=True)
            print(f"step: eager from here on, since {_culprit(error)} cannot be part of a CUDA graph ({_first(error)})")


def _culprit(error: BaseException) -> str:
    """The function and line outside of torch in which a capture failed."""
    error = _root(error)
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "/torch/" not in f.filename]
    own = [f for f in frames if "/paceline/engine/" not in f.filename and "/paceline/parallel/" not in f.filename]
    last = (own or frames)[-1]
    return f"{last.name} ({last.filename}:{last.lineno})"


def _first(error: BaseException) -> str:
    return str(_root(error)).strip().splitlines()[0]


def _root(error: BaseException) -> BaseException:
    """The error that came first: ending a broken capture raises another one."""
    while error.__context__ is not None:
        error = error.__context__
    return error
