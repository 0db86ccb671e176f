"""What a comparison runs: the missing runs, several at a time, and then the parity check and step-time breakdowns."""

from __future__ import annotations

import json
import os
import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from rich.console import Console

from paceline.benchmarking.step_ladder import measure_ladder
from paceline.compare import Options
from paceline.compare.grid import (
    Flags,
    Grid,
    PlannedRun,
    made_from,
    needs_training,
    read_results,
    record_side_by_side,
    start_record,
    training_arguments,
)
from paceline.config.flags import SETTINGS_NOT_IN_VERIFY
from paceline.config.resolve import Config
from paceline.contracts.step_ladder import StepLadder
from paceline.core.errors import UserError
from paceline.core.files import read_json, write_json
from paceline.core.ordered_map import num_cores
from paceline.core.registry import load_class
from paceline.core.terminal import activity, end_activity
from paceline.core.text import four_digits, wrapped
from paceline.core.types import JsonObject
from paceline.launch.child import (
    POLL_SECONDS,
    Child,
    Start,
    Stopped,
    failure_reason,
    forwarded_signals,
    run_paceline,
    start_process,
    stop_late,
    to_arguments,
)
from paceline.launch.tasks import Task, run_in_processes
from paceline.parallel.strategy import Strategy, strategy_name, uses_one_device
from paceline.parallel.world import uses_cuda
from paceline.report.model import Cell, Parity, is_share
from paceline.runs.finished_run import stages_of
from paceline.training.stop import SIGNALS

THREADS = "OMP_NUM_THREADS"
VERIFY_STEPS = 5
Result = TypeVar("Result")


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
        if self._jobs == 1:
            place: Place | None = Place((), 0, 0)
        else:
            place = self._free_gpus(config) if uses_cuda(config.run) else self._free_cores(config.run.devices)
        if place:
            self._taken.append(place)
        return place

    def give_back(self, place: Place) -> None:
        """Free the place of a run that has ended."""
        self._taken.remove(place)

    def _free_gpus(self, config: Config) -> Place | None:
        listed = tuple(config.run.gpus.split(",")) if config.run.gpus else ()
        taken = {gpu for place in self._taken for gpu in place.gpus}
        if len(set(listed)) < len(listed):  # several processes share a GPU, so the run needs exactly these GPUs
            return None if taken & set(listed) else Place(listed, 0, 0)
        free = [gpu for gpu in self._all_gpus if gpu not in taken]
        return Place(tuple(free[: config.run.devices]), 0, 0) if len(free) >= config.run.devices else None

    def _free_cores(self, num_processes: int) -> Place | None:
        """Return an equal share of the cores or, if the user set the threads per process, that many for each."""
        threads = 0 if THREADS in os.environ else max(1, self._num_cores // self._jobs // num_processes)
        needed = min(self._num_cores, num_processes * (threads or given_threads()))
        used = sum(place.cores for place in self._taken)
        return Place((), needed, threads) if used + needed <= self._num_cores else None


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


def train_cells(
    planned: Sequence[PlannedRun], options: Options, folder: Path, places: Places, console: Console, start: Start
) -> None:
    """Train the runs that have not finished, then read the results of all runs; `start` starts their commands.

    A run that fails does not stop the others. If the user stops the command, every run that is being trained saves a
    checkpoint, and `Stopped` is raised.
    """
    running: dict[Child, tuple[PlannedRun, Place]] = {}
    waiting: list[PlannedRun] = []
    titles = {one.cell.name: f"[{number}/{len(planned)}] {one.cell.name}" for number, one in enumerate(planned, 1)}

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
        console.print(f"{titles[one.cell.name]}: training …", soft_wrap=True)
        arguments = [*training_arguments(one, options, one.config.run.out), *place.arguments]
        running[Child(arguments, log_of(one), place.environment, start)] = one, place
        return True

    def finish(one: PlannedRun, code: int = 0) -> None:
        read_results(one, log_of(one), code)
        console.print(wrapped(f"{titles[one.cell.name]}: {_outcome_of(one.cell)}", sys.stdout), soft_wrap=True)
        one.cell.reason = "" if one.cell.state == "done" else one.cell.reason

    end_activity()
    with forwarded_signals(running.keys()) as received:
        for one in planned:
            if one.config is not None:  # the command that trains the run again, in a different folder
                again = training_arguments(one, options, f"{one.config.run.out}-again")
                one.cell.command = f"{threads_prefix()}paceline {shlex.join(again)}"
            if needs_training(one):
                waiting.append(one)
            else:
                finish(one)
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
                    finish(one, code)
            if received and not running:
                break
            if running:
                time.sleep(POLL_SECONDS)
    if received:
        raise Stopped(received[0])


def _outcome_of(cell: Cell) -> str:
    run = cell.run
    if run is None:
        return f"{cell.state}: {cell.reason}"
    speed = f"{run.speed.images_per_second:,.0f} images/s, " if run.speed else ""
    quality = [f"{k} {four_digits(v)}{'%' * is_share(k)}" for k, v in run.quality.items() if v is not None]
    return "  ".join([f"{speed}{run.seconds:.1f} s", *quality]) + (f" ({cell.reason})" if cell.reason else "")


class Measured:
    """The parity check and the step-time breakdowns (step ladders), saved with the report and not repeated."""

    def __init__(self, folder: Path, options: Options, console: Console, start: Start = start_process) -> None:
        self._folder, self._options, self._console, self._start = folder, options, console, start
        self.parity: dict[str, Parity] = {}
        self.missing: list[str] = []
        self._ladders: dict[str, StepLadder] = {}  # keys are run names without the seed

    def verify(self, configs: Mapping[str, Config], flags: Flags, grid: Grid) -> None:
        """Check in a separate process that all strategies produce the same weights, using the runs' settings."""
        classes = {name: load_class("strategy", name, Strategy) for name in grid.strategies}
        obstacles = {name: strategy.why_not("parity") for name, strategy in classes.items()}
        self.missing += [f"parity of {name}: {why}" for name, why in obstacles.items() if why]
        several = [name for name, one in classes.items() if not uses_one_device(one) and not obstacles[name]]
        if not several:
            return
        reference, _ = strategy_name("auto", 1)
        shared = {name: value for name, value in flags.items() if name not in ("gpus", *SETTINGS_NOT_IN_VERIFY)}
        for path, config in configs.items():
            recipe, last = Path(path).stem, stages_of(config)[-1]
            stage = [f"stage={last.recipe.stage}"] if last.recipe != config.recipe else []
            arguments = ["verify", path, "--strategies", ",".join([reference, *several]), "--steps", str(VERIFY_STEPS)]
            arguments += to_arguments(shared, self._options.config_file, [*self._options.assignments, *stage])
            ids = config.run.gpus.split(",") if config.run.gpus else []
            arguments += ["--gpus", ",".join(ids[:2])] if len(ids) > 1 else []
            log = self._folder / "logs" / f"parity-{recipe}.txt"

            def measure(result: Path, arguments: list[str] = arguments, log: Path = log) -> str:
                run_paceline([*arguments, "--json", str(result)], log, self._start)
                return failure_reason(log)

            inputs: JsonObject = {"arguments": [*arguments], "made_from": {**made_from(config)}}
            parity = self._once(f"verify {recipe}", f"parity-{recipe}", inputs, measure, Parity.from_json)
            if parity:
                self.parity[recipe] = parity

    def measure_ladders(self, planned: Sequence[PlannedRun]) -> None:
        """Measure the step-time breakdown of each multi-device run, once for all seeds."""
        for cell, _, _, config in planned:
            if cell.state != "done" or config is None or cell.devices == 1 or cell.kind in self._ladders:
                continue
            obstacle = _ladder_obstacle(cell)
            if obstacle:
                self.missing += [obstacle] if obstacle not in self.missing else []
            elif ladder := self._ladder(cell.kind, stages_of(config)[-1]):
                self._ladders[cell.kind] = ladder

    def _ladder(self, kind: str, config: Config) -> StepLadder | None:
        def measure(result: Path) -> str:
            try:
                code = run_in_processes(Task.of(measure_ladder, str(result.resolve())), config)
            except UserError as error:
                return str(error)
            if code - 128 in SIGNALS:
                raise Stopped(code - 128)
            if code:
                result.unlink(missing_ok=True)
            return f"the measurement failed with exit code {code}"

        inputs: JsonObject = {"made_from": {**made_from(config.with_run(seed=0))}}
        words = f"step-time breakdown for {kind}"
        return self._once(words, f"step-ladder-{kind}", inputs, measure, StepLadder.from_json)

    def _once(
        self,
        words: str,
        name: str,
        inputs: JsonObject,
        measure: Callable[[Path], str],
        parse: Callable[[Mapping[str, Any]], Result],
    ) -> Result | None:
        """Return the saved result for the same inputs, or else the result that `measure` writes to a file.

        If `measure` writes no file, it returns the reason, which is printed and added to the report.
        """
        file, fresh = (self._folder / "measured" / f"{name}{suffix}.json" for suffix in ("", ".fresh"))
        before = read_json(file)
        if before.get("inputs") == inputs:
            try:
                return parse(before["result"])
            except (OSError, LookupError, TypeError, ValueError):
                pass  # the file is damaged, so the measurement is repeated
        file.parent.mkdir(parents=True, exist_ok=True)
        fresh.unlink(missing_ok=True)
        activity(f"measuring: {words}")
        reason = measure(fresh)
        if fresh.is_file():
            try:
                result = json.loads(fresh.read_text())
                parsed = parse(result)
            except (OSError, LookupError, TypeError, ValueError) as error:
                reason = f"{type(error).__name__}: {error}"
            else:
                write_json(file, {"inputs": inputs, "result": result})
                fresh.unlink()
                self._console.print(f"{words}: {parsed if isinstance(parsed, Parity) else 'done'}", soft_wrap=True)
                return parsed
        self.missing.append(f"{words}: {reason}")
        self._console.print(f"{words}: not measured: {reason}", soft_wrap=True)
        return None

    def ladders_by_run(self, cells: Sequence[Cell]) -> dict[str, StepLadder]:
        """Return the step-time breakdowns, keyed by the run's folder."""
        return {cell.run.folder: self._ladders[cell.kind] for cell in cells if cell.run and cell.kind in self._ladders}


def _ladder_obstacle(cell: Cell) -> str:
    """Return why a step-time breakdown cannot be measured, or an empty string if it can."""
    if cell.run is not None and cell.run.shares_a_gpu:
        return "step-time breakdown for several processes on one GPU (runs like this test correctness, not speed)"
    obstacle = load_class("strategy", cell.strategy, Strategy).why_not("breakdown")
    return f"step-time breakdown for {cell.strategy} × {cell.devices} ({obstacle})" if obstacle else ""
