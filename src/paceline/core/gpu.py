"""How work runs on GPUs: the precision of float32 products, and independent tasks on concurrent streams."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import torch


def allow_tf32(allowed: bool) -> None:
    """Allow or forbid TF32 in matrix products and convolutions in this process."""
    torch.backends.cudnn.allow_tf32 = allowed
    torch.set_float32_matmul_precision("high" if allowed else "highest")


@contextmanager
def keeping_tf32() -> Iterator[None]:
    """Restore at the end whether TF32 is allowed."""
    convolutions, products = torch.backends.cudnn.allow_tf32, torch.get_float32_matmul_precision()
    try:
        yield
    finally:
        torch.backends.cudnn.allow_tf32 = convolutions
        torch.set_float32_matmul_precision(products)


@contextmanager
def float32_products(*, tf32: bool) -> Iterator[None]:
    """Allow or forbid TF32 inside the context, whatever the run's precision is."""
    with keeping_tf32():
        allow_tf32(tf32)
        yield


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
