"""Trains the runs of a comparison, several at a time if there are enough devices and cores."""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from rich.console import Console

from paceline.compare.cells import (
    PlannedRun,
    needs_training,
    read_results,
    record_side_by_side,
    start_record,
    training_arguments,
)
from paceline.compare.grid import Options
from paceline.compare.progress import Progress
from paceline.config.resolve import Config
from paceline.core.ordered_map import num_cores
from paceline.launch.child import POLL_SECONDS, Child, Start, Stopped, forwarded_signals, stop_late
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


class _Job(NamedTuple):
    planned: PlannedRun
    log: Path


class _PlacedChild(Child):
    """A child process and the part of the machine that it uses."""

    def __init__(self, arguments: Sequence[str], log: Path, place: Place, start: Start) -> None:
        super().__init__(arguments, log, place.environment, start)
        self.place = place


def train_cells(
    planned: Sequence[PlannedRun], options: Options, folder: Path, places: Places, console: Console, start: Start
) -> None:
    """Train the runs that have not finished, then read the results of all runs; `start` starts their commands.

    A run that fails does not stop the others. If the user stops the command, every run that is being trained saves a
    checkpoint, and `Stopped` is raised.
    """
    jobs: dict[_PlacedChild, _Job] = {}
    waiting: list[_Job] = []
    with Progress(console, planned) as progress, forwarded_signals(jobs.keys()) as received:
        for one in planned:
            log = folder / "logs" / f"{one.cell.name}.txt"
            if one.config is not None:
                one.cell.command = _repeating_command(one, options)
            if needs_training(one):
                waiting.append(_Job(one, log))
            else:
                read_results(one, log)
                progress.finish(one)
        while waiting or jobs:
            if not received:
                waiting = [job for job in waiting if not _begin(job, jobs, options, places, progress, start)]
                stop_late(jobs, received)
                assert jobs, "no place for any of the runs"
            for child, job in list(jobs.items()):
                code = child.poll()
                if code is None:
                    continue
                del jobs[child]
                places.give_back(child.place)
                if code == 0 or not received:  # a run that the user stopped has not failed
                    read_results(job.planned, job.log, code)
                    progress.finish(job.planned)
            if received and not jobs:
                break
            if jobs:
                progress.show([job.planned for job in jobs.values()])
                time.sleep(POLL_SECONDS)
    if received:
        raise Stopped(received[0])


def _repeating_command(one: PlannedRun, options: Options) -> str:
    """Return the command that trains a run again, in a different folder."""
    assert one.config is not None
    again = one._replace(config=one.config.with_run(out=f"{one.config.run.out}-again"))
    return f"{threads_prefix()}paceline {shlex.join(training_arguments(again, options))}"


def _begin(
    job: _Job, jobs: dict[_PlacedChild, _Job], options: Options, places: Places, progress: Progress, start: Start
) -> bool:
    """Start a run if there is a place for it; return whether it was started."""
    assert job.planned.config is not None
    place = places.take(job.planned.config)
    if place is None:
        return False
    start_record(job.planned)
    if jobs:
        for other in (job, *jobs.values()):
            record_side_by_side(other.planned)
    arguments = [*training_arguments(job.planned, options), *place.arguments]
    progress.begin(job.planned)
    jobs[_PlacedChild(arguments, job.log, place, start)] = job
    return True
