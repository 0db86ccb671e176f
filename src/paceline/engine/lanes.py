"""Phases that need nothing of each other, side by side: each on a stream of its own inside a captured step.

Small networks leave most of a GPU idle. In a CUDA graph, kernels on different streams run at the same time; outside
of one the host launches them too slowly for that, so there phases simply follow each other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import torch

from paceline.recipe import Phase

Result = TypeVar("Result")


def groups(due: Iterable[Phase]) -> list[list[Phase]]:
    """The phases in order, together where they may run at the same time."""
    together: list[list[Phase]] = []
    for phase in due:
        if phase.beside and together and all(phase.network != other.network for other in together[-1]):
            together[-1].append(phase)
        else:
            together.append([phase])
    return together


def run_side_by_side(tasks: Sequence[Callable[[], Result]], device: torch.device) -> list[Result]:
    """The tasks' results; while a step is captured, all but the first task run on streams of their own."""
    if len(tasks) == 1 or device.type != "cuda" or not torch.cuda.is_current_stream_capturing():
        return [task() for task in tasks]
    main, results = torch.cuda.current_stream(device), []
    lanes = [main, *(torch.cuda.Stream(device) for _ in tasks[1:])]
    for lane in lanes[1:]:
        lane.wait_stream(main)  # before the first task is recorded there
    for lane, task in zip(lanes, tasks, strict=True):
        with torch.cuda.stream(lane):
            results.append(task())
    for lane in lanes[1:]:
        main.wait_stream(lane)
    return results
