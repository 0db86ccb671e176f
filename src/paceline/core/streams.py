"""Run independent tasks concurrently, each on its own CUDA stream while a CUDA graph is captured.

Small networks leave most of a GPU idle. In a CUDA graph, kernels on different streams run concurrently. Without a
graph, the host launches kernels too slowly to benefit, so tasks run one at a time. A backward pass runs on the stream
of its forward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

Result = TypeVar("Result")
# The annotation is needed because torch does not annotate this constructor.
_new_stream: Callable[[torch.device], torch.cuda.Stream] = torch.cuda.Stream


def run_concurrently(tasks: Sequence[Callable[[], Result]], device: torch.device) -> list[Result]:
    """Return the results of the tasks; during graph capture, every task except the first runs on its own stream."""
    if len(tasks) == 1 or device.type != "cuda" or not torch.cuda.is_current_stream_capturing():
        return [task() for task in tasks]
    main, results = torch.cuda.current_stream(device), []
    streams = [main, *(_new_stream(device) for _ in tasks[1:])]
    for stream in streams[1:]:
        stream.wait_stream(main)  # called before the first task, so no stream waits for that task
    for stream, task in zip(streams, tasks, strict=True):
        with torch.cuda.stream(stream):
            results.append(task())
    for stream in streams[1:]:
        main.wait_stream(stream)
    return results
