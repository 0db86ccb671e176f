"""`paceline compare`: train a grid of runs, or read finished runs, and report which strategy to use and why."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.markdown import Markdown

from paceline.commands.configure import configure
from paceline.compare import Options
from paceline.compare.grid import (
    LISTS,
    Flags,
    Grid,
    PlannedRun,
    check_kept,
    check_new,
    check_options,
    check_recipes,
    finished_cells,
)
from paceline.compare.training import Measured, Places, threads_prefix, train_cells
from paceline.config.resolve import Config
from paceline.core.errors import UserError
from paceline.core.files import user_path
from paceline.core.terminal import open_screen
from paceline.core.text import print_line
from paceline.launch.child import ForkServers, Start, Stopped, start_process
from paceline.parallel.world import uses_cuda
from paceline.report.build import make_report, write_report
from paceline.report.groups import check_comparable
from paceline.report.model import Cell, Report
from paceline.runs.folder import RunFolder


def compare_runs(folders: Sequence[str], flags: Flags, options: Options, across_recipes: bool) -> int:
    """Write a report on finished runs."""
    check_new(folders[0], flags, options)
    cells = finished_cells(folders, across_recipes)
    stems = list(dict.fromkeys(cell.recipe for cell in cells))
    data = next(cell.run.data for cell in cells if cell.run is not None)
    folder = user_path(str(flags.get("out") or f"runs/compare-finished-{'-'.join(stems)}-{Path(data).stem}"))
    missing = ["step-time breakdown and parity (only `paceline compare RECIPE` measures them)"]
    with _only_writer(folder):
        _finish(make_report(_title(stems, data), cells, not_measured=missing + _side_by_side(cells)), folder)
    return 0


def compare_recipes(recipes: Sequence[str], flags: Flags, options: Options) -> int:
    """Train the missing runs in the grid and write the report; return 1 if any run failed."""
    check_options(flags, options)
    shared = {name: value for name, value in flags.items() if name not in LISTS and name != "out"}
    configs = {name: _configure_recipe(name, shared, options) for name in recipes if name}
    check_recipes(configs)
    grid = Grid.of(configs, flags, options)
    stems = [Path(name).stem for name in configs]
    data = next(iter(configs.values())).run.data
    folder = user_path(str(flags.get("out") or f"runs/compare-{'-'.join(stems)}-{Path(data).stem}"))
    planned = [_plan(one, shared, options, folder) for one in grid.cells(configs)]
    cells = [one.cell for one in planned]
    with _only_writer(folder), _command_starter(configs) as start:
        check_kept(folder, planned)
        console = open_screen()
        measured = Measured(folder, options, console, start)
        try:
            places = Places(options.jobs or 1, str(shared.get("gpus", "")))
            train_cells(planned, options, folder, places, console, start)
            runs = [cell.run for cell in cells if cell.run is not None]
            if not runs:
                print_line(f"no run finished; no report was written to {folder}", sys.stderr)
                return 1
            check_comparable(runs, across_recipes=len(configs) > 1)
            if options.verify is not False:
                measured.verify(configs, shared, grid)
            if options.step_ladder is not False:
                measured.measure_ladders(planned)
        except Stopped as stop:
            print_line("stopped; run the same command again to resume (finished runs are not repeated)", sys.stderr)
            return 128 + stop.number
        report = make_report(
            _title(stems, data),
            cells,
            command=f"{threads_prefix()}paceline {shlex.join(sys.argv[1:])}" if "compare" in sys.argv[1:2] else "",
            step_ladders=measured.ladders_by_run(cells),
            parity=measured.parity,
            not_measured=measured.missing + _side_by_side(cells),
        )
        _finish(report, folder)
        return int(any(cell.state == "failed" for cell in cells))


def _side_by_side(cells: Sequence[Cell]) -> list[str]:
    return [
        f"speed of {cell.label or cell.name} (the run was trained at the same time as other runs)"
        for cell in cells
        if cell.run is not None and cell.run.side_by_side
    ]


@contextmanager
def _command_starter(configs: Mapping[str, Config]) -> Iterator[Start]:
    """Yield a function that starts the runs: as forks, which start quickly, unless a run uses a GPU."""
    if sys.platform != "linux" or any(uses_cuda(config.run) for config in configs.values()):
        yield start_process
    else:
        with ForkServers() as servers:
            yield servers.start


def _configure_recipe(recipe: str, shared: Flags, options: Options) -> Config:
    """Return the checked settings that all runs of a recipe share; each run's GPUs are chosen later."""
    flags = {name: value for name, value in shared.items() if name != "gpus"}
    config = configure(recipe, flags, config_file=options.config_file, assignments=options.assignments)
    return config.with_run(gpus=str(shared.get("gpus", "")))


def _plan(one: PlannedRun, shared: Flags, options: Options, folder: Path) -> PlannedRun:
    """Add the settings of its run to a cell of the grid; mark the cell as failed if the settings are invalid."""
    cell, flags = one.cell, {**shared, **one.flags}
    config = None
    if cell.state != "not measured":
        try:
            config = configure(one.recipe, flags, config_file=options.config_file, assignments=options.assignments)
            config = config.with_run(out=str(folder / "cells" / cell.name))
        except UserError as error:
            cell.state, cell.reason = "failed", str(error)
    return one._replace(flags=flags, config=config)


@contextmanager
def _only_writer(folder: Path) -> Iterator[None]:
    """Lock a comparison's folder, so that two comparisons cannot write to it at the same time."""
    claimed = RunFolder(folder)
    claimed.claim()
    try:
        yield
    finally:
        claimed.release()


def _title(recipes: Sequence[str], data: str) -> str:
    """Return the title of a report that compares these recipes."""
    return f"{' against '.join(recipes)} on {Path(data).stem}"


def _finish(report: Report, folder: Path) -> None:
    """Write the report, then print its summary and its path."""
    summary = write_report(report, folder)
    console = open_screen()
    console.print()
    for sentence in summary:
        console.print(Markdown(sentence))
    print(f"report: {folder / 'report.html'}")
