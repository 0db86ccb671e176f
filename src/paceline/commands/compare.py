"""`paceline compare`: a grid of runs, or finished ones, become a report that says which to use and why."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markdown import Markdown
from rich.status import Status

from paceline.commands.configure import configure
from paceline.compare.cells import check_kept, read_one, run_cell
from paceline.compare.grid import Grid
from paceline.compare.measured import Measured
from paceline.config.files import parse_assignments
from paceline.config.resolve import Config
from paceline.core.errors import UserError
from paceline.core.json_file import kept
from paceline.core.registry import names
from paceline.core.screen import as_it_is, open_screen
from paceline.launch.child import Stopped, words_of
from paceline.report.build import make_report, write_report
from paceline.report.numbers import Cell, check_alike, make_groups
from paceline.report.phrases import fill
from paceline.report.runs import Run
from paceline.runs.folder import RunFolder
from paceline.runs.stages import last_finished

EACH_ITS_OWN = {"seed": "--seeds", "strategy": "--strategies"}  # of a run; the lists of the grid have other names
EACH_ITS_OWN |= {"devices": "--devices", "batch_size": "--batch-size", "gpus": "--gpus", "out": "--out"}


@dataclass(frozen=True)
class Options:
    """What a person asked for besides the settings of the runs; None is what was not said."""

    strategies: str | None = None
    seeds: str | None = None
    scaling: str | None = None
    verify: bool | None = None
    ceilings: bool | None = None
    config_file: str = ""
    assignments: tuple[str, ...] = ()

    def said(self) -> list[str]:
        """The flags that ask for runs to be made, or for more to be measured."""
        flags: dict[str, object] = {"--strategies": self.strategies, "--seeds": self.seeds}
        flags |= {"--scaling": self.scaling, "--verify": self.verify or None, "--ceilings": self.ceilings or None}
        flags |= {"--config": self.config_file or None, "--set": self.assignments or None}
        return [name for name, value in flags.items() if value is not None]


def runs_among(words: Sequence[str]) -> bool:
    """Whether the words are folders of runs; a mixture with recipes is refused."""
    if not all(words):
        raise UserError("compare '': names neither a recipe nor a run's folder")
    folders = [word for word in words if _is_folder_of_run(word)]
    if folders and len(folders) < len(words):
        other = next(word for word in words if word not in folders)
        raise UserError(
            f"{other}: not a run's folder, while {folders[0]} is a folder; compare recipes or runs, not both"
        )
    return bool(folders)


def _is_folder_of_run(word: str) -> bool:
    """A folder that has the name of a recipe is meant only where it holds a run."""
    folder = Path(word)
    return folder.is_dir() and (word not in names("recipe") or RunFolder(folder).config_file.is_file())


def compare_runs(folders: Sequence[str], flags: dict[str, Any], options: Options, across_recipes: bool) -> int:
    """The report of runs that others made."""
    said = [*(f"--{name.replace('_', '-')}" for name in flags if name != "out"), *options.said()]
    if said:
        raise UserError(f"{said[0]}: is for runs that compare makes, and {folders[0]} is made already; leave it out")
    found: dict[Path, str] = {}  # by what a path means, however it is written
    for path in map(last_finished, folders):
        found.setdefault(Path(path).resolve(), path)
    runs = [read_one(path) for path in found.values()]
    check_alike(runs, across_recipes)
    cells = [_cell_of(run) for run in runs]
    _refuse_copies(cells)
    stems = list(dict.fromkeys(cell.recipe for cell in cells))
    target = Path(flags.get("out") or f"runs/compare-finished-{'-'.join(stems)}-{Path(runs[0].data).stem}")
    not_measured = ["ceilings and parity (these are finished runs; `paceline compare RECIPE` measures them)"]
    with _only_writer(target):
        _finish(_title(stems, runs[0].data), cells, target, not_measured=not_measured)
    return 0


def compare_recipes(recipes: Sequence[str], flags: dict[str, Any], options: Options) -> int:
    """Runs what is not done yet of the grid, one process at a time, then writes the report; 1 where a cell failed."""
    _check_words(flags, options)
    flags = dict(flags)
    devices, out, batches = flags.pop("devices", "2"), flags.pop("out", ""), flags.pop("batch_size", None)
    seeds, strategies = flags.pop("seed", options.seeds), flags.pop("strategy", options.strategies)
    configs = {name: _configured(name, flags, options) for name in recipes if name}
    if not configs:
        raise UserError("compare: names no recipe, so there is nothing to run")
    _check_recipes(configs)
    first = next(iter(configs.values())).run
    grid = Grid.parse(
        list(configs),
        "single,ddp" if strategies is None else strategies,
        str(devices),
        first.batch_size if batches is None else batches,
        str(first.seed if seeds is None else seeds),
        "strong" if options.scaling is None else options.scaling,
    )
    stems = [Path(name).stem for name in configs]
    title = _title(stems, first.data)
    folder = Path(out or f"runs/compare-{'-'.join(stems)}-{Path(first.data).stem}")
    with _only_writer(folder):
        return _compare_cells(configs, flags, options, grid, folder, title)


def _compare_cells(
    configs: dict[str, Config], flags: dict[str, Any], options: Options, grid: Grid, folder: Path, title: str
) -> int:
    console, measured = open_screen(), Measured(folder)
    by_stem = {Path(name).stem: name for name in configs}
    chosen = [(cell, by_stem[cell.recipe], flags | own) for cell, own in grid.cells(configs)]
    wanted = [(cell, _config_of_cell(cell, recipe, own, options, folder)) for cell, recipe, own in chosen]
    cells = [cell for cell, _ in wanted]
    check_kept(folder, wanted)
    try:
        for number, ((cell, recipe, own), (_, config)) in enumerate(zip(chosen, wanted, strict=True), start=1):
            with _saying(console, f"[{number}/{len(wanted)}] {cell.name}", cell) as status:
                if config is not None:
                    arguments = ["train", recipe, "--out", config.run.out]
                    arguments += words_of(own, options.config_file, options.assignments)
                    run_cell(cell, config, arguments, folder / "logs" / f"{cell.name}.txt", status)
        _check_cells(cells, len(configs) > 1)
        if options.verify is not False:
            measured.verify(console, configs, flags, grid, options.config_file, options.assignments)
        if options.ceilings is not False:
            measured.ceilings(console, wanted)
    except Stopped as stop:
        print("stopped; the same command resumes from here and repeats no finished run", file=sys.stderr)
        return 128 + stop.number
    if all(cell.run is None for cell in cells) and kept(folder / "report.json").get("counts", {}).get("done"):
        print(f"no run came to its end; {folder}/report.html stays as it was", file=sys.stderr)
        return 1
    command = "paceline " + shlex.join(sys.argv[1:]) if "compare" in sys.argv[1:2] else ""
    _finish(title, cells, folder, command, measured.ceilings_by_group(cells), measured.parity, measured.missing)
    return int(any(cell.state == "failed" for cell in cells))


@contextmanager
def _only_writer(folder: Path) -> Iterator[None]:
    """Holds the folder of a comparison as a run's is held: two at once would mix."""
    claimed = RunFolder(folder)
    claimed.claim()
    try:
        yield
    finally:
        claimed.release()


def _check_words(flags: dict[str, Any], options: Options) -> None:
    """Refuses what is said twice, or for all runs where each has its own."""
    for name, many in (("seed", options.seeds), ("strategy", options.strategies)):
        if name in flags and many is not None:
            raise UserError(f"--{name} {flags[name]}: cannot go with {EACH_ITS_OWN[name]}; put it into that list")
    for name in parse_assignments(options.assignments):
        flag = EACH_ITS_OWN.get(name.replace("-", "_"))
        if flag:
            raise UserError(f"--set {name}: compare gives each run its own; use {flag}")


def _refuse_copies(cells: Sequence[Cell]) -> None:
    """A run counts once: its copy would make a spread over seeds of nothing."""
    for group in make_groups(cells).values():
        by_seed: dict[int, str] = {}
        for seed, folder in zip(group["seeds"], group["runs"], strict=True):
            if by_seed.setdefault(seed, folder) != folder:
                told = f"{group['label']}, seed {seed}"
                raise UserError(f"{by_seed[seed]} and {folder}: the same run twice ({told}); leave one out")


def _check_recipes(configs: dict[str, Config]) -> None:
    """Refuses recipes that cannot share a table, before anything runs."""
    by_stem: dict[str, str] = {}
    for name, config in configs.items():
        other = by_stem.setdefault(Path(name).stem, name)
        if other != name:
            raise UserError(f"{other} and {name} would have one name in the report; rename one of the files")
        for setting in ("mirror", "resume_from"):
            if getattr(config.run, setting):
                flag = f"--{setting.replace('_', '-')}"
                raise UserError(f"{flag}: is for one run, and compare makes many; give it to train")
    (name, first), *others = configs.items()
    for other, config in others:
        if config.run.data != first.run.data:
            told = f"{first.run.data} and {config.run.data}"
            raise UserError(f"{name} and {other} would learn from different data ({told}); say which with --data")
        judged = [one.recipe_class for one in (first, config)]
        if judged[0].best != judged[1].best or judged[0].evaluator != judged[1].evaluator:
            told = " and ".join(recipe.best[0] for recipe in judged)
            raise UserError(f"{name} and {other} are judged by different metrics ({told}) and cannot be compared")


def _configured(recipe: str, flags: dict[str, Any], options: Options) -> Config:
    """The settings that all cells of a recipe share, checked; devices are each cell's own."""
    shared = {name: value for name, value in flags.items() if name != "gpus"}
    config = configure(recipe, shared, config_file=options.config_file, assignments=options.assignments)
    return config.with_run(gpus=str(flags.get("gpus", "")))


def _config_of_cell(cell: Cell, recipe: str, flags: dict[str, Any], options: Options, folder: Path) -> Config | None:
    """The settings of one run; nothing where it cannot be run, which its cell then says."""
    if cell.state == "not measured":
        return None
    try:
        config = configure(recipe, flags, config_file=options.config_file, assignments=options.assignments)
    except UserError as mistake:
        cell.state, cell.reason = "failed", str(mistake)
        return None
    return config.with_run(out=str(folder / "cells" / cell.name))


@contextmanager
def _saying(console: Console, words: str, cell: Cell) -> Iterator[Status | None]:
    """Says what is being run, and in a line what came of it."""
    if console.is_terminal:
        with console.status(as_it_is(words)) as status:
            yield status
    else:
        yield None
    if cell.state == "not measured":
        console.print(f"{words}: not measured: {cell.reason}", soft_wrap=True)
    elif cell.state == "failed":
        console.print(f"{words}: failed: {cell.reason}", soft_wrap=True)
    elif cell.run is not None:
        speed = cell.run.speed.get("images_per_second")
        shown = f"{speed:,.0f} images/s, " if speed else ""
        quality = "  ".join(f"{name} {value:.4g}" for name, value in cell.run.quality.items() if value is not None)
        again = " (done before)" if cell.reason else ""
        cell.reason = ""
        console.print(f"{words}: {shown}{cell.run.seconds:.1f} s  {quality}{again}", soft_wrap=True)


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
    replaced = _others(kept(folder / "report.json"), cells)
    page = write_report(report, folder)
    console = open_screen()
    console.print()
    for phrase in report["summary"]:
        console.print(Markdown(fill(phrase, report)))
    if replaced:
        print(f"this report takes the place of one that had other runs: {', '.join(replaced)}")
    print(f"report: {page}")


def _others(report: dict[str, Any], cells: Sequence[Cell]) -> list[str]:
    """The runs of a report that are not among those of another one, however their paths are written."""
    before = report.get("runs")
    own = {Path(cell.run.folder).resolve() for cell in cells if cell.run is not None}
    return [name for name in before if Path(name).resolve() not in own] if isinstance(before, dict) else []
