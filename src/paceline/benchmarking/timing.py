"""Time repeated calls to a function."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from time import perf_counter
from typing import NamedTuple

import numpy as np
import torch


class Timing(NamedTuple):
    """Elapsed seconds per function call."""

    median: float
    low: float  # 10th percentile
    high: float  # 90th percentile
    n: int


def measure(function: Callable[[], object], *, device: torch.device, warmup: int = 10, repeats: int = 30) -> Timing:
    """Time individual calls after a warm-up, with CUDA events on a GPU and `perf_counter` on a CPU."""
    assert repeats > 0, repeats
    for _ in range(warmup):
        function()
    seconds = (
        _seconds_by_events(function, device, repeats) if device.type == "cuda" else _seconds_by_clock(function, repeats)
    )
    low, median, high = np.percentile(seconds, [10, 50, 90])
    return Timing(float(median), float(low), float(high), repeats)


def _seconds_by_clock(function: Callable[[], object], repeats: int) -> list[float]:
    seconds = []
    for _ in range(repeats):
        start = perf_counter()
        function()
        seconds.append(perf_counter() - start)
    return seconds


def _seconds_by_events(function: Callable[[], object], device: torch.device, repeats: int) -> list[float]:
    """Time calls with CUDA events; wait for the device only at the end, so that calls are queued as in training."""
    with torch.cuda.device(device):
        torch.cuda.synchronize()
        event = partial(torch.cuda.Event, enable_timing=True)
        marks = [event() for _ in range(repeats + 1)]
        marks[0].record()
        for mark in marks[1:]:
            function()
            mark.record()
        torch.cuda.synchronize()
    return [before.elapsed_time(after) / 1000 for before, after in pairwise(marks)]
