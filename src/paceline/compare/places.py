"""The GPUs and CPU cores that runs of a comparison use at the same time."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from typing import NamedTuple

import torch

from paceline.config.resolve import Config
from paceline.core.ordered_map import num_cores
from paceline.parallel.world import uses_cuda

THREADS = "OMP_NUM_THREADS"


class Place(NamedTuple):
    """The part of the machine that one run uses: certain GPUs, or a number of CPU cores."""

    gpus: tuple[str, ...]
    cores: int
    threads: int  # number of threads per process; 0 for PyTorch's default

    @property
    def arguments(self) -> list[str]:
        """The command-line arguments that assign the GPUs to a run."""
        return ["--gpus", ",".join(self.gpus)] if self.gpus else []

    @property
    def environment(self) -> Mapping[str, str]:
        """The environment variables that limit a run to its cores."""
        return {THREADS: str(self.threads)} if self.threads else {}


class Places:
    """The free GPUs and CPU cores. No GPU and no core is used by two runs at the same time."""

    def __init__(self, jobs: int, gpus: str = "") -> None:
        """Divide the machine among at most `jobs` runs; `gpus` lists the GPUs to use (default: all)."""
        self._jobs = jobs
        listed = gpus.split(",") if gpus else map(str, range(torch.cuda.device_count()))
        self._all_gpus = tuple(dict.fromkeys(listed))
        self._num_cores = num_cores()
        self._taken: list[Place] = []

    def take(self, config: Config) -> Place | None:
        """Return a free place for a run, or None if the run has to wait."""
        if len(self._taken) >= self._jobs:
            return None
        place = self._free_gpus(config) if uses_cuda(config.run) else self._free_cores(config.run.devices)
        if place:
            self._taken.append(place)
        return place

    def give_back(self, place: Place) -> None:
        """Free the place of a run that has ended."""
        self._taken.remove(place)

    def _free_gpus(self, config: Config) -> Place | None:
        own = tuple(config.run.gpus.split(",")) if config.run.gpus else ()
        if self._jobs == 1:
            return Place((), 0, 0)
        taken = {gpu for place in self._taken for gpu in place.gpus}
        if len(set(own)) < len(own):  # several processes share a GPU, so the run needs exactly these GPUs
            return None if taken & set(own) else Place(own, 0, 0)
        free = [gpu for gpu in self._all_gpus if gpu not in taken]
        return Place(tuple(free[: config.run.devices]), 0, 0) if len(free) >= config.run.devices else None

    def _free_cores(self, num_processes: int) -> Place | None:
        if self._jobs == 1:
            return Place((), self._num_cores, 0)
        threads = self._threads(num_processes)
        needed = min(self._num_cores, num_processes * (threads or _given_threads()))
        used = sum(place.cores for place in self._taken)
        return Place((), needed, threads) if used + needed <= self._num_cores else None

    def _threads(self, num_processes: int) -> int:
        """Return the threads per process that give each run an equal share of the cores; 0 if the user set them."""
        return 0 if THREADS in os.environ else max(1, self._num_cores // self._jobs // num_processes)


def threads_prefix() -> str:
    """Return the assignment of OMP_NUM_THREADS to put before a command, if the user set the variable."""
    return f"{THREADS}={shlex.quote(os.environ[THREADS])} " if THREADS in os.environ else ""


def _given_threads() -> int:
    first = os.environ[THREADS].split(",")[0].strip()
    return max(1, int(first)) if first.isdecimal() else 1
