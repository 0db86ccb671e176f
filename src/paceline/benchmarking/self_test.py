"""The part of the self-test that each process runs: a timed all-reduce and, on several GPUs, a CUDA graph check."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from paceline.benchmarking.graph_check import ReplayCheck, check_replay
from paceline.benchmarking.timing import measure
from paceline.config.resolve import Config
from paceline.core.files import write_json
from paceline.core.types import JsonObject
from paceline.parallel.world import join

ALL_REDUCE_MEGABYTES = 45  # size of a ResNet-18's gradients


@dataclass(frozen=True)
class AllReduce:
    """The time that an all-reduce takes, in milliseconds: median, 10th and 90th percentiles over n repeats."""

    milliseconds: float
    low: float
    high: float
    n: int
    backend: str
    processes: int


@dataclass(frozen=True)
class DeviceTest:
    """The combined results from all processes in a self-test."""

    all_reduce: AllReduce
    graph: ReplayCheck | None  # None unless there are several GPUs

    def to_json(self) -> JsonObject:
        """Return the result as JSON."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> DeviceTest:
        """Return the result that `to_json` wrote."""
        graph = values["graph"]
        return cls(AllReduce(**values["all_reduce"]), ReplayCheck(**graph) if graph else None)


def measure_devices(config: Config, path: str) -> None:
    """Run the test in this process; rank 0 writes the result to a JSON file."""
    world = join(config.run, distributed=True)
    tensor = torch.ones(ALL_REDUCE_MEGABYTES * 2**20 // 4, device=world.device)
    timing = measure(lambda: dist.all_reduce(tensor), device=world.device, warmup=3, repeats=10)
    milliseconds = timing.median * 1e3, timing.low * 1e3, timing.high * 1e3
    graph = check_replay(config, world) if world.backend == "nccl" else None
    if world.is_first:
        all_reduce = AllReduce(*milliseconds, timing.n, world.backend, world.size)
        write_json(Path(path), DeviceTest(all_reduce, graph).to_json())
    world.wait_for_all()
    world.leave()
