"""Additional measurements for a comparison. They are saved with the report and not repeated."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console

from paceline.benchmarking.step_ladder import measure_ladder
from paceline.compare.cells import PlannedRun, made_from
from paceline.compare.grid import Grid
from paceline.compare.options import Flags, Options
from paceline.config.command_settings import SETTINGS_NOT_IN_VERIFY
from paceline.config.resolve import Config
from paceline.contracts.step_ladder import StepLadder
from paceline.core.activity import activity
from paceline.core.errors import UserError
from paceline.core.files import write_json
from paceline.core.registry import load_class
from paceline.core.small_files import read_json
from paceline.core.types import JsonObject
from paceline.launch.child import Start, Stopped, failure_reason, run_paceline, start_process, to_arguments
from paceline.launch.tasks import Task, run_in_processes
from paceline.parallel.strategy import Strategy, strategy_name
from paceline.report.groups import group_name
from paceline.report.model import Cell, Parity
from paceline.runs.stages import stages_of
from paceline.training.stop import INTERRUPTED

VERIFY_STEPS = 5
Result = TypeVar("Result")


class Measured:
    """The result of the parity check, and step-time breakdowns (step ladders) of runs on several devices."""

    def __init__(self, folder: Path, console: Console, start: Start = start_process) -> None:
        self.folder, self.console, self._start = folder / "measured", console, start
        self.parity: dict[str, Parity] = {}
        self.missing: list[str] = []
        self._ladders: dict[str, StepLadder] = {}  # keys are run names without the seed

    def verify(self, configs: Mapping[str, Config], flags: Flags, grid: Grid, options: Options) -> None:
        """Check in a separate process that all strategies produce the same weights, using the runs' settings."""
        classes = {name: load_class("strategy", name, Strategy) for name in grid.strategies}
        self.missing += [
            f"parity of {name}: {one.parity_obstacle}" for name, one in classes.items() if one.parity_obstacle
        ]
        several = [name for name, one in classes.items() if one.max_devices != 1 and not one.parity_obstacle]
        if not several:
            return
        reference, _ = strategy_name("auto", 1)
        shared = {name: value for name, value in flags.items() if name not in ("gpus", *SETTINGS_NOT_IN_VERIFY)}
        for recipe, config in configs.items():
            arguments = ["verify", recipe, "--strategies", ",".join([reference, *several])]
            arguments += ["--steps", str(VERIFY_STEPS)]
            last = stages_of(config)[-1]
            stage = [f"stage={last.recipe.stage}"] if last.recipe != config.recipe else []
            arguments += to_arguments(shared, options.config_file, [*options.assignments, *stage])
            ids = config.run.gpus.split(",") if config.run.gpus else []
            arguments += ["--gpus", ",".join(ids[:2])] if len(ids) > 1 else []
            parity = self._parity(Path(recipe).stem, arguments, made_from(config))
            if parity:
                self.parity[Path(recipe).stem] = parity

    def _parity(self, recipe: str, arguments: list[str], made: dict[str, str]) -> Parity | None:
        log = self.folder.parent / "logs" / f"parity-{recipe}.txt"

        def measure(result: Path) -> str:
            run_paceline([*arguments, "--json", str(result)], log, self._start)
            return failure_reason(log)

        inputs: JsonObject = {"arguments": [*arguments], "made_from": {**made}}
        return self._once(f"verify {recipe}", f"parity-{recipe}", inputs, measure, Parity.from_json)

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
            if code == INTERRUPTED:
                raise Stopped(signal.SIGINT)
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
        file, fresh = self.folder / f"{name}.json", self.folder / f"{name}.fresh.json"
        before = read_json(file)
        if before.get("inputs") == inputs:
            try:
                return parse(before["result"])
            except (KeyError, TypeError, ValueError):
                pass  # the file is damaged, so the measurement is repeated
        self.folder.mkdir(parents=True, exist_ok=True)
        fresh.unlink(missing_ok=True)
        activity(f"measuring: {words}")
        reason = measure(fresh)
        if not fresh.is_file():
            self.missing.append(f"{words}: {reason}")
            self.console.print(f"{words}: not measured: {reason}", soft_wrap=True)
            return None
        result = json.loads(fresh.read_text())
        write_json(file, {"inputs": inputs, "result": result})
        fresh.unlink()
        parsed = parse(result)
        outcome = str(parsed) if isinstance(parsed, Parity) else "done"
        self.console.print(f"{words}: {outcome}", soft_wrap=True)
        return parsed

    def ladders_by_group(self, cells: Sequence[Cell]) -> dict[str, StepLadder]:
        """Return the step-time breakdowns, keyed by the group's name in the report."""
        return {
            group_name(cell.run): self._ladders[cell.kind]
            for cell in cells
            if cell.run is not None and cell.kind in self._ladders
        }


def _ladder_obstacle(cell: Cell) -> str:
    """Return why a step-time breakdown cannot be measured, or an empty string if it can."""
    if cell.run is not None and cell.run.shares_a_gpu:
        return "step-time breakdown for several processes on one GPU (runs like this test correctness, not speed)"
    obstacle = load_class("strategy", cell.strategy, Strategy).ladder_obstacle
    return f"step-time breakdown for {cell.strategy} × {cell.devices} ({obstacle})" if obstacle else ""
