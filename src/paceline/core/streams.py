"""Independent tasks side by side: each on its own CUDA stream while a step is captured into a CUDA graph.

Small networks leave most of a GPU idle. In a CUDA graph, kernels on different streams run at the same time. Outside
of one, the host launches them too slowly for that, so there the tasks simply follow each other. A backward pass runs
on the stream of its forward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

Result = TypeVar("Result")
_new_stream: Callable[[torch.device], torch.cuda.Stream] = torch.cuda.Stream  # which torch leaves untyped


def run_concurrently(tasks: Sequence[Callable[[], Result]], device: torch.device) -> list[Result]:
    """Return the tasks' results; during capture, every task but the first runs on a stream of its own."""
    if len(tasks) == 1 or device.type != "cuda" or not torch.cuda.is_current_stream_capturing():
        return [task() for task in tasks]
    main, results = torch.cuda.current_stream(device), []
    streams = [main, *(_new_stream(device) for _ in tasks[1:])]
    for stream in streams[1:]:
        stream.wait_stream(main)  # before the first task is recorded there
    for stream, task in zip(streams, tasks, strict=True):
        with torch.cuda.stream(stream):
            results.append(task())
    for stream in streams[1:]:
        main.wait_stream(stream)
    return results
