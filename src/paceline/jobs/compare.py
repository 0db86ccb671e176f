"""`paceline compare`: a grid of runs, or finished ones, become a report that says which to use and why."""

from __future__ import annotations

import re
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markdown import Markdown
from rich.status import Status

from paceline.config import Config
from paceline.errors import UserError
from paceline.jobs._child import Stopped, last_words, run_paceline
from paceline.jobs._grid import Grid
from paceline.jobs._kept import keep, kept
from paceline.jobs._measured import Measured
from paceline.jobs.configure import configure
from paceline.monitor.metrics import METRICS
from paceline.recipe import Recipe
from paceline.registry import load_class
from paceline.report.build import make_report, write_report
from paceline.report.numbers import Cell, check_alike
from paceline.report.phrases import fill
from paceline.report.runs import Run, read_run

LAST_BYTES = 4096  # of metrics, which hold the last line
KEPT = "cell.json"  # beside a run that has ended: the command that made it, so that it is not made twice


@dataclass(frozen=True)
class Wish:
    """What a person asked for besides the settings of the runs."""

    strategies: str = "single,ddp"
    seeds: str = "0"
    scaling: str = "strong"
    verify: bool = True
    ceilings: bool = True
    config_file: str = ""
    assignments: tuple[str, ...] = ()


def runs_among(words: Sequence[str]) -> bool:
    """Whether the words are folders of runs; a mixture with recipes is refused."""
    folders = [word for word in words if Path(word).is_dir()]
    if folders and len(folders) < len(words):
        other = next(word for word in words if word not in folders)
        raise UserError(
            f"{other}: not a run's folder, while {folders[0]} is a folder; compare recipes or runs, not both"
        )
    return bool(folders)


def compare_runs(folders: Sequence[str], out: str, across_recipes: bool) -> int:
    """The report of runs that others made."""
    runs = [read_run(folder) for folder in dict.fromkeys(folders)]
    check_alike(runs, across_recipes)
    cells = [_cell_of(run) for run in runs]
    stems = list(dict.fromkeys(cell.recipe for cell in cells))
    target = Path(out or f"runs/compare-{'-'.join(stems)}-{Path(runs[0].data).stem}")
    not_measured = ["ceilings and parity (these are finished runs; `paceline compare RECIPE` measures them)"]
    _finish(_title(stems, runs[0].data), cells, target, not_measured=not_measured)
    return 0


def compare_recipes(recipes: Sequence[str], flags: dict[str, Any], wish: Wish) -> int:
    """Runs what is not done yet of the grid, one process at a time, then writes the report; 1 where a cell failed."""
    for name in ("mirror", "resume_from"):
        if flags.get(name):
            raise UserError(f"--{name.replace('_', '-')}: is for one run, and compare makes many; give it to train")
    flags = dict(flags)
    devices, out = str(flags.pop("devices", "2")), flags.pop("out", "")
    batches, seeds = flags.pop("batch_size", ""), str(flags.pop("seed", wish.seeds))
    strategies = flags.pop("strategy", wish.strategies)
    configs = {name: _configured(name, flags, wish) for name in recipes if name}
    if not configs:
        raise UserError("compare: names no recipe, so there is nothing to run")
    _check_recipes(configs)
    first = next(iter(configs.values()))
    grid = Grid.parse(
        list(configs), strategies, devices, batches if batches != "" else first.run.batch_size, seeds, wish.scaling
    )
    stems = [Path(name).stem for name in configs]
    folder = Path(out or f"runs/compare-{'-'.join(stems)}-{Path(first.run.data).stem}")
    console = Console(highlight=False)
    wanted = grid.cells(configs)
    cells = [cell for cell, _ in wanted]
    title = _title(stems, first.run.data)
    measured = Measured(folder)
    try:
        for number, (cell, own) in enumerate(wanted, start=1):
            recipe = next(name for name in configs if Path(name).stem == cell.recipe)
            with _saying(console, f"[{number}/{len(wanted)}] {cell.name}", cell) as status:
                _run_cell(cell, _arguments(recipe, flags, own, wish, folder / "cells" / cell.name), folder, status)
        _check_cells(cells, len(configs) > 1)
        if wish.verify:
            measured.verify(console, configs, flags, grid)
        if wish.ceilings:
            measured.ceilings(console, configs, flags, wanted, wish.config_file, wish.assignments)
    except Stopped as stop:
        print("stopped; the same command goes on from here and repeats no finished run", file=sys.stderr)
        return 128 + stop.number
    command = "paceline " + shlex.join(sys.argv[1:]) if "compare" in sys.argv[1:2] else ""
    _finish(title, cells, folder, command, measured.ceilings_by_group(cells), measured.parity, measured.missing)
    return int(any(cell.state == "failed" for cell in cells))


def _check_recipes(configs: dict[str, Config]) -> None:
    """Refuses recipes that cannot share a table, before anything runs."""
    (name, first), *others = configs.items()
    for other, config in others:
        if config.run.data != first.run.data:
            told = f"{first.run.data} and {config.run.data}"
            raise UserError(f"{name} and {other} would learn from different data ({told}); say which with --data")
        judged = [load_class("recipe", one, Recipe) for one in (name, other)]
        if judged[0].best != judged[1].best or judged[0].judge != judged[1].judge:
            told = " and ".join(recipe.best[0] for recipe in judged)
            raise UserError(f"{name} and {other} are judged by different metrics ({told}) and cannot be compared")


def _configured(recipe: str, flags: dict[str, Any], wish: Wish) -> Config:
    """The settings that all cells of a recipe share, checked; devices are each cell's own."""
    shared = {name: value for name, value in flags.items() if name != "gpus"}
    config = configure(recipe, shared, config_file=wish.config_file, assignments=wish.assignments)
    return config.with_run(gpus=str(flags.get("gpus", "")))


def _arguments(recipe: str, flags: dict[str, Any], own: dict[str, Any], wish: Wish, out: Path) -> list[str]:
    """The `train` command of one cell."""
    words = ["train", recipe, "--out", str(out)]
    for name, value in (flags | own).items():
        flag = f"--{name.replace('_', '-')}"
        if isinstance(value, bool):
            words.append(flag if value else flag.replace("--", "--no-", 1))
        else:
            words += [flag, str(value)]
    words += ["--config", wish.config_file] if wish.config_file else []
    return words + [word for one in wish.assignments for word in ("--set", one)]


def _run_cell(cell: Cell, arguments: list[str], folder: Path, status: Status | None) -> None:
    """Trains the cell, if it is not there already, and reads what came of it."""
    if cell.state == "not measured":
        return
    run_folder, log = folder / "cells" / cell.name, folder / "logs" / f"{cell.name}.txt"
    if kept(run_folder / KEPT).get("arguments") != arguments:
        start = time.monotonic()
        code = run_paceline(arguments, log, lambda: _show_progress(status, cell.name, run_folder))
        if code:
            cell.state, cell.reason = "failed", last_words(log)
            return
        keep(run_folder / KEPT, {"arguments": arguments, "wall_seconds": time.monotonic() - start})
    else:
        cell.reason = "done before"
    cell.run = read_run(str(run_folder))
    cell.state = "done"


def _show_progress(status: Status | None, name: str, run_folder: Path) -> None:
    """Reads no more than the end of the metrics: the run needs the machine more."""
    metrics = run_folder / METRICS
    if status is None or not metrics.is_file():
        return
    with metrics.open("rb") as file:
        file.seek(max(0, metrics.stat().st_size - LAST_BYTES))
        seen = re.findall(rb'"images": (\d+)', file.read())
    if seen:
        status.update(f"{name}  {int(seen[-1]):,} images")


@contextmanager
def _saying(console: Console, words: str, cell: Cell) -> Iterator[Status | None]:
    """Says what is being run, and in a line what came of it."""
    if console.is_terminal:
        with console.status(words) as status:
            yield status
    else:
        yield None
    if cell.state == "not measured":
        console.print(f"{words}: not measured: {cell.reason}", markup=False, soft_wrap=True)
    elif cell.state == "failed":
        console.print(f"{words}: failed: {cell.reason}", markup=False, soft_wrap=True)
    elif cell.run is not None:
        speed = cell.run.speed.get("images_per_second")
        shown = f"{speed:,.0f} images/s, " if speed else ""
        quality = "  ".join(f"{name} {value:.4g}" for name, value in cell.run.quality.items() if value is not None)
        again = " (done before)" if cell.reason else ""
        cell.reason = ""
        console.print(f"{words}: {shown}{cell.run.seconds:.1f} s  {quality}{again}", markup=False, soft_wrap=True)


def _check_cells(cells: Sequence[Cell], across_recipes: bool) -> None:
    runs = [cell.run for cell in cells if cell.run is not None]
    if runs:
        check_alike(runs, across_recipes)


def _cell_of(run: Run) -> Cell:
    recipe = Path(run.recipe).stem
    state = "done" if run.quality or run.speed else "unfinished"
    reason = "" if run.finished else f"stopped at {run.images:,} images"
    cell = Cell(run.folder, recipe, run.strategy, run.devices, str(run.batch), run.seed, state, reason, run)
    if state == "done" and not run.finished:
        cell.state = "unfinished"
    return cell


def _title(recipes: Sequence[str], data: str) -> str:
    return f"{' against '.join(recipes)} on {Path(data).stem}"


def _finish(
    title: str,
    cells: Sequence[Cell],
    folder: Path,
    command: str = "",
    ceilings: dict[str, dict[str, Any]] | None = None,
    parity: dict[str, dict[str, Any]] | None = None,
    not_measured: Sequence[str] = (),
) -> None:
    """Writes the report, says its summary and, last, where it lies."""
    report = make_report(
        title, cells, command=command, ceilings=ceilings, parity=parity, not_measured=list(not_measured)
    )
    page = write_report(report, folder)
    console = Console(highlight=False)
    console.print()
    for phrase in report["summary"]:
        console.print(Markdown(fill(phrase, report)))
    print(f"report: {page}")
