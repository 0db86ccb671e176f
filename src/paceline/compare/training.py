"""Trains the runs of a comparison, several at a time if there are enough devices and cores."""

from __future__ import annotations

import os
import re
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple, Self

import torch
from rich.console import Console

from paceline.compare.cells import (
    needs_training,
    read_results,
    record_side_by_side,
    start_record,
    training_arguments,
)
from paceline.compare.grid import Options, PlannedRun
from paceline.config.resolve import Config
from paceline.core.errors import UserError
from paceline.core.ordered_map import num_cores
from paceline.core.terminal import Counter, end_activity
from paceline.core.text import four_digits, wrapped
from paceline.launch.child import POLL_SECONDS, Child, Start, Stopped, forwarded_signals, stop_late
from paceline.parallel.world import uses_cuda
from paceline.report.model import Cell
from paceline.report.wording import is_share
from paceline.runs.finished_run import stages_of
from paceline.runs.metrics import METRICS
from paceline.runs.status import Status

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
        """Return GPUs or CPU cores that are free for a run, or None if the run has to wait."""
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
        needed = min(self._num_cores, num_processes * (threads or given_threads()))
        used = sum(place.cores for place in self._taken)
        return Place((), needed, threads) if used + needed <= self._num_cores else None

    def _threads(self, num_processes: int) -> int:
        """Return the threads per process that give each run an equal share of the cores; 0 if the user set them."""
        return 0 if THREADS in os.environ else max(1, self._num_cores // self._jobs // num_processes)


def threads_prefix() -> str:
    """Return the assignment of OMP_NUM_THREADS to put before a command, if the user set the variable."""
    return f"{THREADS}={shlex.quote(os.environ[THREADS])} " if THREADS in os.environ else ""


def given_threads() -> int:
    """Return the value of OMP_NUM_THREADS, or its first number if it is a list with one number per nesting level."""
    text = os.environ.get(THREADS, "1")
    first = text.split(",")[0].strip()
    if not first.isdecimal() or int(first) < 1:
        raise UserError(f"{THREADS}={text}: not a valid number of threads; set it to a number like 1, or unset it")
    return int(first)


LAST_BYTES = 4096  # number of bytes to read from the end of the metrics file; enough for the last line


class Progress:
    """Prints one line for each run that starts or ends, and counts the images that the runs have seen in between."""

    def __init__(self, console: Console, planned: Sequence[PlannedRun]) -> None:
        self._console = console
        self._numbers = {one.cell.name: number for number, one in enumerate(planned, start=1)}
        self._counters = ExitStack()  # contains at most one counter
        self._counter: Counter | None = None

    def __enter__(self) -> Self:
        end_activity()
        return self

    def __exit__(self, *_: object) -> None:
        self._counters.close()
        self._counter = None

    def begin(self, one: PlannedRun) -> None:
        """Report that training of a run has started."""
        self.__exit__()
        self._console.print(f"{self._words(one.cell)}: training …", soft_wrap=True)

    def show(self, running: Sequence[PlannedRun]) -> None:
        """Show how many images the runs have seen, as soon as all of them have started."""
        counts = [count for one in running if (count := _count_images(one))]
        if len(counts) < len(running):
            return
        if self._counter is None:
            words = ", ".join(self._words(one.cell) for one in running)
            counter = Counter(f"{words}: images", sum(total for _, total in counts))
            self._counter = self._counters.enter_context(counter)
        self._counter.update(sum(seen for seen, _ in counts))

    def finish(self, one: PlannedRun) -> None:
        """Print the outcome of a run."""
        self.__exit__()
        cell, words = one.cell, self._words(one.cell)
        if cell.state in ("not measured", "failed"):
            self._console.print(f"{words}: {cell.state}: {cell.reason}", soft_wrap=True)
        elif cell.run is not None:
            alone = cell.run.speed is not None and not cell.run.side_by_side
            speed = f"{cell.run.speed.images_per_second:,.0f} images/s, " if alone and cell.run.speed else ""
            quality = "  ".join(
                f"{name} {four_digits(value)}{'%' * is_share(name)}"
                for name, value in cell.run.quality.items()
                if value is not None
            )
            again = " (already finished)" if cell.reason else ""
            cell.reason = ""
            line = f"{words}: {speed}{cell.run.seconds:.1f} s  {quality}{again}"
            self._console.print(wrapped(line, sys.stdout), soft_wrap=True)

    def _words(self, cell: Cell) -> str:
        return f"[{self._numbers[cell.name]}/{len(self._numbers)}] {cell.name}"


def _count_images(one: PlannedRun) -> tuple[int, int] | None:
    """Return how many images a run has seen, of how many; to be fast, read only the end of the metrics file."""
    assert one.config is not None
    folder = Path(stages_of(one.config)[0].run.out)  # folder of the current stage
    status, metrics = Status.of(folder), folder / METRICS
    if status is None or not metrics.is_file():
        return None
    with metrics.open("rb") as file:
        file.seek(max(0, metrics.stat().st_size - LAST_BYTES))
        seen = re.findall(rb'"images": (\d+)', file.read())
    return int(seen[-1]) if seen else 0, status.total_images


def train_cells(
    planned: Sequence[PlannedRun], options: Options, folder: Path, places: Places, console: Console, start: Start
) -> None:
    """Train the runs that have not finished, then read the results of all runs; `start` starts their commands.

    A run that fails does not stop the others. If the user stops the command, every run that is being trained saves a
    checkpoint, and `Stopped` is raised.
    """
    running: dict[Child, tuple[PlannedRun, Place]] = {}
    waiting: list[PlannedRun] = []

    def log_of(one: PlannedRun) -> Path:
        return folder / "logs" / f"{one.cell.name}.txt"

    def begin(one: PlannedRun) -> bool:
        """Start a run if there is a place for it; return whether it was started."""
        assert one.config is not None
        place = places.take(one.config)
        if place is None:
            return False
        start_record(one)
        for other in (one, *(other for other, _ in running.values())) if running else ():
            record_side_by_side(other)
        progress.begin(one)
        arguments = [*training_arguments(one, options, one.config.run.out), *place.arguments]
        running[Child(arguments, log_of(one), place.environment, start)] = one, place
        return True

    with Progress(console, planned) as progress, forwarded_signals(running.keys()) as received:
        for one in planned:
            if one.config is not None:  # the command that trains the run again, in a different folder
                again = training_arguments(one, options, f"{one.config.run.out}-again")
                one.cell.command = f"{threads_prefix()}paceline {shlex.join(again)}"
            if needs_training(one):
                waiting.append(one)
            else:
                read_results(one, log_of(one))
                progress.finish(one)
        while waiting or running:
            if not received:
                waiting = [one for one in waiting if not begin(one)]
                stop_late(running, received)
                assert running, "no place for any of the runs"
            for child, (one, place) in list(running.items()):
                code = child.poll()
                if code is None:
                    continue
                del running[child]
                places.give_back(place)
                if code == 0 or not received:  # a run that the user stopped has not failed
                    read_results(one, log_of(one), code)
                    progress.finish(one)
            if received and not running:
                break
            if running:
                progress.show([one for one, _ in running.values()])
                time.sleep(POLL_SECONDS)
    if received:
        raise Stopped(received[0])
