"""Work that needs nothing of each other, side by side: each part on a stream of its own inside a captured step.

Small networks leave most of a GPU idle. In a CUDA graph, kernels on different streams run at the same time; outside
of one the host launches them too slowly for that, so there the parts simply follow each other. A backward pass runs
where its forward did.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

Result = TypeVar("Result")


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
