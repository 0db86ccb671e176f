"""What a comparison measures beside its runs, and keeps with its report so that it is measured once."""

from __future__ import annotations

import json
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from paceline.benchmarking.step_ladder import measure_ladder
from paceline.compare.cells import made_from
from paceline.compare.grid import Grid
from paceline.config.resolve import Config
from paceline.config.settings import SETTINGS_NOT_IN_VERIFY
from paceline.core.errors import UserError
from paceline.core.json_file import keep, kept
from paceline.launch.child import Stopped, last_words, run_paceline, words_of
from paceline.launch.tasks import Task, run_in_processes
from paceline.report.numbers import Cell, group_name
from paceline.runs.stages import stages_of
from paceline.training.stop import INTERRUPTED

VERIFY_STEPS = 5


class Measured:
    """Parity of the strategies and ceilings of their steps."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "measured"
        self.parity: dict[str, dict[str, Any]] = {}
        self.missing: list[str] = []
        self._ceilings: dict[str, dict[str, Any]] = {}  # by a cell's name without its seed

    def verify(
        self,
        console: Console,
        configs: dict[str, Config],
        flags: dict[str, Any],
        grid: Grid,
        config_file: str,
        assignments: Sequence[str],
    ) -> None:
        """The parity table of each recipe, in a process of its own, with the settings of the runs."""
        several = [name for name in grid.strategies if name not in ("single", "dp")]
        if "dp" in grid.strategies:
            self.missing.append("parity of dp: its BatchNorm is each replica's own, so it differs where there is one")
        if not several:
            return
        for recipe, config in configs.items():
            arguments = ["verify", recipe, "--strategies", ",".join(["single", *several]), "--steps", str(VERIFY_STEPS)]
            shared = {name: value for name, value in flags.items() if name not in ("gpus", *SETTINGS_NOT_IN_VERIFY)}
            last = stages_of(config)[-1]
            stage = [f"stage={last.recipe.stage}"] if last.recipe != config.recipe else []
            arguments += words_of(shared, config_file, [*assignments, *stage])
            ids = config.run.gpus.split(",") if config.run.gpus else []
            arguments += ["--gpus", ",".join(ids[:2])] if len(ids) > 1 else []
            stem = Path(recipe).stem
            found = self._once(console, f"verify {stem}", f"parity-{stem}", arguments, made_from(config))
            if found:
                self.parity[stem] = found

    def _once(
        self, console: Console, words: str, name: str, arguments: list[str], facts: dict[str, str]
    ) -> dict[str, Any] | None:
        """What a command writes to its `--json` file, of the last time where nothing has changed."""
        file = self.folder / f"{name}.json"
        before = kept(file)
        if (before.get("arguments"), before.get("made_from")) == (arguments, facts):
            return before["result"]
        fresh, log = self.folder / f"{name}.fresh.json", self.folder.parent / "logs" / f"{name}.txt"
        self.folder.mkdir(parents=True, exist_ok=True)
        fresh.unlink(missing_ok=True)
        run_paceline([*arguments, "--json", str(fresh)], log)
        if not fresh.is_file():
            self.missing.append(f"{words}: {last_words(log)}")
            console.print(f"{words}: not measured: {last_words(log)}", soft_wrap=True)
            return None
        result = json.loads(fresh.read_text())
        keep(file, {"arguments": arguments, "made_from": facts, "result": result})
        fresh.unlink()
        console.print(f"{words}: done", soft_wrap=True)
        return result

    def ceilings(self, console: Console, wanted: Sequence[tuple[Cell, Config | None]]) -> None:
        """The ladder of each kind of cell on several devices, in as many processes."""
        for cell, config in wanted:
            if cell.state != "done" or config is None or cell.devices == 1 or _kind(cell) in self._ceilings:
                continue
            why = _why_no_ceilings(cell)
            if why:
                self.missing += [why] if why not in self.missing else []
                continue
            self._measure_ceilings(console, _kind(cell), stages_of(config)[-1])

    def _measure_ceilings(self, console: Console, kind: str, config: Config) -> None:
        file, facts = self.folder / f"ceilings-{kind}.json", made_from(config.with_run(seed=0))
        if (before := kept(file)).get("made_from") == facts:
            self._ceilings[kind] = before["result"]
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        fresh = self.folder / f"ceilings-{kind}.fresh.json"
        fresh.unlink(missing_ok=True)
        why = ""
        try:
            code = run_in_processes(Task.of(measure_ladder, str(fresh.resolve())), config)
            why = f"the measurement ended with exit code {code}" if code else ""
        except UserError as mistake:
            code, why = 2, str(mistake)
        if code == INTERRUPTED:
            raise Stopped(signal.SIGINT)
        if why or not fresh.is_file():
            self.missing.append(f"ceilings of {kind}: {why}")
            return
        self._ceilings[kind] = json.loads(fresh.read_text())
        keep(file, {"made_from": facts, "result": self._ceilings[kind]})
        fresh.unlink()
        console.print(f"ceilings of {kind}: done", soft_wrap=True)

    def ceilings_by_group(self, cells: Sequence[Cell]) -> dict[str, dict[str, Any]]:
        """The ladders by the names that the report's groups have."""
        found = {}
        for cell in cells:
            if cell.run is not None and _kind(cell) in self._ceilings:
                found[group_name(cell.run)] = self._ceilings[_kind(cell)]
        return found


def _why_no_ceilings(cell: Cell) -> str:
    if cell.run is not None and cell.run.shares_a_gpu:
        return "ceilings of several processes on one GPU (they show equality, not speed)"
    if cell.strategy == "lightning":
        return f"ceilings of lightning × {cell.devices} (its Trainer drives the steps; those of ddp are close)"
    return f"ceilings of dp × {cell.devices} (one process drives all its devices)" if cell.strategy == "dp" else ""


def _kind(cell: Cell) -> str:
    return cell.name.partition("-seed")[0]
