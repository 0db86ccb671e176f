"""Additional measurements for a comparison. They are saved with the report and not repeated."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console

from paceline.benchmarking.step_ladder import measure_ladder
from paceline.compare.cells import made_from, without_speed
from paceline.compare.grid import Flags, Grid, Options, PlannedRun
from paceline.config.flags import SETTINGS_NOT_IN_VERIFY
from paceline.config.resolve import Config
from paceline.contracts.step_ladder import StepLadder
from paceline.core.errors import UserError
from paceline.core.files import read_json, write_json
from paceline.core.registry import load_class
from paceline.core.terminal import activity
from paceline.core.types import JsonObject
from paceline.launch.child import Start, Stopped, failure_reason, run_paceline, start_process, to_arguments
from paceline.launch.tasks import Task, run_in_processes
from paceline.parallel.strategy import Strategy, strategy_name, uses_one_device
from paceline.report.model import Cell, Parity, Run
from paceline.report.reader import read_run
from paceline.runs.finished_run import stages_of
from paceline.training.stop import SIGNALS

SPEED_SECONDS = 5.0  # approximate duration of the training that measures a speed
MIN_STEPS = 32
LOG_INTERVALS = 8
KEPT_TIMES = ("data", "step", "between_steps")  # not the others: evaluation and saving take up too much of a short run
VERIFY_STEPS = 5
Result = TypeVar("Result")


class Measured:
    """Speeds of runs that were trained side by side, the parity check, and step-time breakdowns (step ladders)."""

    def __init__(self, folder: Path, options: Options, console: Console, start: Start = start_process) -> None:
        self._folder, self._options, self._console, self._start = folder, options, console, start
        self.parity: dict[str, Parity] = {}
        self.missing: list[str] = []
        self._ladders: dict[str, StepLadder] = {}  # keys are run names without the seed

    def measure_speeds(self, planned: Sequence[PlannedRun]) -> None:
        """Replace the speeds of runs that were trained side by side by those of short runs that train alone."""
        alone: dict[str, Run | None] = {}
        for one in planned:
            cell = one.cell
            if cell.run is None or not cell.run.side_by_side:
                continue
            if cell.kind not in alone:
                alone[cell.kind] = self._train_alone(one, cell.run)
            cell.run = _with_speed(cell.run, alone[cell.kind])

    def _train_alone(self, one: PlannedRun, run: Run) -> Run | None:
        """Return a short run with the same settings, trained while nothing else runs; None if it fails."""
        assert one.config is not None
        last, out = stages_of(one.config)[-1], self._folder / "speeds" / one.cell.kind
        wanted = min(SPEED_SECONDS * run.speed.images_per_second, run.images) if run.speed else 0.0
        steps = max(MIN_STEPS, round(wanted / run.batch))
        images, per_log = steps * run.batch, max(1, steps // LOG_INTERVALS) * run.batch
        flags = {**one.flags, "images": images, "out": str(out)}
        flags |= {"init_from": last.run.init_from} if last.run.init_from else {}
        intervals = ["evaluate_every=never", "sample_every=never", "save_every=100%", f"log_every={per_log} images"]
        arguments = ["train", one.recipe, *self._arguments(flags, one.config, *intervals)]

        def measure(result: Path) -> str:
            shutil.rmtree(out, ignore_errors=True)
            log = self._folder / "logs" / f"speed-{out.name}.txt"
            if run_paceline(arguments, log, self._start) == 0:
                write_json(result, {"folder": str(out)})
            return failure_reason(log)

        def parse(content: Mapping[str, Any]) -> Run:
            run = read_run(content["folder"])
            if run.speed is None:
                raise UserError("the run has no log interval to measure")
            return run

        inputs: JsonObject = {"made_from": {**made_from(last.with_run(images=images))}}
        return self._once(f"speed of {one.cell.kind}", f"speed-{one.cell.kind}", inputs, measure, parse)

    def verify(self, configs: Mapping[str, Config], flags: Flags, grid: Grid) -> None:
        """Check in a separate process that all strategies produce the same weights, using the runs' settings."""
        classes = {name: load_class("strategy", name, Strategy) for name in grid.strategies}
        self.missing += [
            f"parity of {name}: {why}" for name, strategy in classes.items() if (why := strategy.why_not("parity"))
        ]
        several = [
            name
            for name, strategy in classes.items()
            if not uses_one_device(strategy) and not strategy.why_not("parity")
        ]
        if not several:
            return
        reference, _ = strategy_name("auto", 1)
        shared = {name: value for name, value in flags.items() if name not in ("gpus", *SETTINGS_NOT_IN_VERIFY)}
        for recipe, config in configs.items():
            arguments = ["verify", recipe, "--strategies", ",".join([reference, *several])]
            arguments += ["--steps", str(VERIFY_STEPS), *self._arguments(shared, config)]
            ids = config.run.gpus.split(",") if config.run.gpus else []
            arguments += ["--gpus", ",".join(ids[:2])] if len(ids) > 1 else []
            parity = self._parity(Path(recipe).stem, arguments, made_from(config))
            if parity:
                self.parity[Path(recipe).stem] = parity

    def _parity(self, recipe: str, arguments: list[str], made: dict[str, str]) -> Parity | None:
        def measure(result: Path) -> str:
            log = self._folder / "logs" / f"parity-{recipe}.txt"
            run_paceline([*arguments, "--json", str(result)], log, self._start)
            return failure_reason(log)

        inputs: JsonObject = {"arguments": [*arguments], "made_from": {**made}}
        return self._once(f"verify {recipe}", f"parity-{recipe}", inputs, measure, Parity.from_json)

    def _arguments(self, flags: Flags, config: Config, *assignments: str) -> list[str]:
        """Return the settings of a command that runs the last stage of a recipe."""
        last = stages_of(config)[-1]
        stage = [f"stage={last.recipe.stage}"] if last.recipe != config.recipe else []
        return to_arguments(flags, self._options.config_file, [*self._options.assignments, *stage, *assignments])

    def measure_ladders(self, planned: Sequence[PlannedRun]) -> None:
        """Measure the step-time breakdown of each multi-device run, once for all seeds."""
        for cell, _, _, config in planned:
            if cell.state != "done" or config is None or cell.devices == 1 or cell.kind in self._ladders:
                continue
            obstacle = _ladder_obstacle(cell)
            if obstacle:
                self.missing += [obstacle] if obstacle not in self.missing else []
                continue
            ladder = self._ladder(cell.kind, stages_of(config)[-1])
            if ladder:
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
                reason = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
            else:
                write_json(file, {"inputs": inputs, "result": result})
                fresh.unlink()
                self._console.print(f"{words}: {_outcome(parsed)}", soft_wrap=True)
                return parsed
        self.missing.append(f"{words}: {reason}")
        self._console.print(f"{words}: not measured: {reason}", soft_wrap=True)
        return None

    def ladders_by_run(self, cells: Sequence[Cell]) -> dict[str, StepLadder]:
        """Return the step-time breakdowns, keyed by the run's folder."""
        return {
            cell.run.folder: self._ladders[cell.kind]
            for cell in cells
            if cell.run is not None and cell.kind in self._ladders
        }


def _outcome(result: object) -> str:
    if isinstance(result, Run) and result.speed:
        return f"{result.speed.images_per_second:,.0f} images/s"
    return str(result) if isinstance(result, Parity) else "done"


def _with_speed(run: Run, alone: Run | None) -> Run:
    """Return a run with the speed of a run that was trained alone, or without a speed."""
    if alone is None:
        return without_speed(run)
    times = {name: value for name, value in alone.seconds_per_epoch.items() if name in KEPT_TIMES}
    return replace(
        run,
        speed=alone.speed,
        speed_run=alone.folder,
        seconds_per_epoch=times,
        gpu=alone.gpu,
        load_average=alone.load_average,
    )


def _ladder_obstacle(cell: Cell) -> str:
    """Return why a step-time breakdown cannot be measured, or an empty string if it can."""
    if cell.run is not None and cell.run.shares_a_gpu:
        return "step-time breakdown for several processes on one GPU (runs like this test correctness, not speed)"
    obstacle = load_class("strategy", cell.strategy, Strategy).why_not("breakdown")
    return f"step-time breakdown for {cell.strategy} × {cell.devices} ({obstacle})" if obstacle else ""
