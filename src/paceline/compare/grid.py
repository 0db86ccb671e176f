"""The runs in a comparison: the grid of runs to train, the runs that have finished, and what was recorded of them."""

from __future__ import annotations

import itertools
import os
import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple, TypeAlias

import torch

from paceline.compare import Options
from paceline.config.files import PROVENANCE, parse_assignments
from paceline.config.flags import COMPARE_DEVICES, STRATEGIES
from paceline.config.resolve import Config
from paceline.config.settings import split_batch
from paceline.core.errors import UserError
from paceline.core.files import is_folder_locked, parse_toml, read_bounded, read_json, write_json
from paceline.core.registry import is_path, load_class, names
from paceline.core.types import SettingValue
from paceline.data.fingerprint import describe_samples, is_same_data
from paceline.data.source import open_sources
from paceline.launch.child import failure_reason, to_arguments
from paceline.parallel.strategy import Strategy, uses_one_device, why_unavailable
from paceline.parallel.world import uses_cuda
from paceline.report.groups import check_comparable, make_groups, short_names
from paceline.report.model import Cell, Run
from paceline.report.reader import read_run
from paceline.runs.finished_run import last_finished, stages_in, stages_of
from paceline.runs.folder import RunFolder
from paceline.runs.recipe import find_recipe
from paceline.runs.record import CONFIG
from paceline.runs.status import Status
from paceline.runs.weights import is_weights_file

Flags: TypeAlias = Mapping[str, SettingValue]  # values of the settings that the user gave as flags, by name

LISTS = {"seed": "--seeds", "strategy": "--strategies", "devices": "--devices", "batch_size": "--batch-size"}
PER_RUN = LISTS | {"gpus": "--gpus", "out": "--out"}  # settings that differ between runs, and their flags


def check_new(folder: str, flags: Flags, options: Options) -> None:
    """Raise UserError for flags that apply only to new runs; the message names `folder`, a finished run."""
    given = [*(_flag(name) for name in flags if name != "out"), *options.given()]
    if given:
        raise UserError(f"{given[0]}: applies only to new runs, but {folder} is a finished run; leave this flag out")


def check_options(flags: Flags, options: Options) -> None:
    """Raise UserError if a setting is given twice, or if `--set` contains a setting that varies between the runs."""
    for name, many in (("seed", options.seeds), ("strategy", options.strategies)):
        if name in flags and many is not None:
            raise UserError(
                f"--{name} {flags[name]}: cannot be combined with {LISTS[name]}; add the value to that list"
            )
    for name in parse_assignments(options.assignments):
        flag = PER_RUN.get(name.replace("-", "_"))
        if flag:
            raise UserError(f"--set {name}: each run in a comparison has its own value; use {flag}")


def check_recipes(configs: Mapping[str, Config]) -> None:
    """Raise UserError for recipes that cannot be compared in one table."""
    if not configs:
        raise UserError("compare: no recipe given; specify at least one")
    by_stem: dict[str, str] = {}
    for name, config in configs.items():
        other = by_stem.setdefault(Path(name).stem, name)
        if other != name:
            raise UserError(f"{other} and {name} would have the same name in the report; rename one of the files")
        for setting in ("mirror", "resume_from"):
            if getattr(config.run, setting):
                raise UserError(
                    f"{_flag(setting)}: applies to a single run, but compare trains several; use it with train"
                )
    (name, first), *others = configs.items()
    for other, config in others:
        if config.run.data != first.run.data:
            both = f"{first.run.data} and {config.run.data}"
            raise UserError(f"{name} and {other} would be trained on different data ({both}); choose one with --data")
        evaluations = [one.recipe_class.evaluation for one in (first, config)]
        if evaluations[0] != evaluations[1]:
            both = " and ".join(evaluation.best for evaluation in evaluations)
            raise UserError(
                f"{name} and {other} are evaluated with different metrics ({both}); compare them separately"
            )


def _flag(setting: str) -> str:
    return f"--{setting.replace('_', '-')}"


class PlannedRun(NamedTuple):
    """A cell of the grid and its run's settings; `config` is None if the run cannot be trained."""

    cell: Cell
    recipe: str
    flags: Flags
    config: Config | None = None

    @property
    def folder(self) -> Path:
        """The folder of a run that can be trained."""
        assert self.config is not None
        return Path(self.config.run.out)


@dataclass(frozen=True)
class Grid:
    """The values of each option; a comparison trains all combinations of them."""

    recipes: tuple[str, ...]
    strategies: tuple[str, ...]
    devices: tuple[int, ...]
    batches: tuple[str, ...]
    seeds: tuple[int, ...]
    weak: bool  # weak scaling: batch sizes are per device

    @classmethod
    def of(cls, configs: Mapping[str, Config], flags: Flags, options: Options) -> Grid:
        """Return the grid for the recipes in `configs`; values not given by the user come from the first recipe."""
        first = next(iter(configs.values())).run
        seeds, strategies = flags.get("seed", options.seeds), flags.get("strategy", options.strategies)
        chosen = _words("--strategies", STRATEGIES if strategies is None else strategies)
        for name in chosen:
            load_class("strategy", name, Strategy)  # raises UserError for an unknown strategy
        batches = _words("--batch-size", flags.get("batch_size", first.batch_size))
        for batch in batches:
            split_batch(batch, 1, 1)  # raises UserError for an invalid batch size
        devices = _numbers("--devices", flags.get("devices", COMPARE_DEVICES), at_least=1)
        numbers = _numbers("--seeds", first.seed if seeds is None else seeds, at_least=0)
        return cls(tuple(configs), chosen, devices, batches, numbers, options.scaling == "weak")

    def cells(self, configs: Mapping[str, Config]) -> list[PlannedRun]:
        """Return all cells; if a run is not possible on this machine, its cell contains the reason."""
        return [
            self._cell(configs[recipe], recipe, strategy, devices, batch, seed)
            for recipe, batch, strategy in itertools.product(self.recipes, self.batches, self.strategies)
            for devices, seed in itertools.product(self._device_counts(strategy), self.seeds)
        ]

    def _device_counts(self, strategy: str) -> list[int]:
        """Return the device counts to train with, limited to the strategy's maximum."""
        return [1] if uses_one_device(load_class("strategy", strategy, Strategy)) else list(dict.fromkeys(self.devices))

    def _cell(self, config: Config, recipe: str, strategy: str, devices: int, batch: str, seed: int) -> PlannedRun:
        batch = f"{batch}/device" if self.weak and not batch.endswith("/device") else batch
        gpus = config.run.gpus.split(",")[:devices] if config.run.gpus else []
        flags: dict[str, SettingValue] = {"strategy": strategy, "devices": devices, "batch_size": batch, "seed": seed}
        if config.run.compile == "auto":
            flags["compile"] = "off"  # each run would choose for itself, by measurements that change from run to run
        if config.run.gpus:
            flags["gpus"] = ",".join(gpus)
        stem = Path(recipe).stem
        name = f"{stem}-{Path(strategy).stem}-{devices}-batch{batch.replace('/', '-per-')}-seed{seed}"
        if len(set(gpus)) < len(gpus):
            name += "-on-one-gpu"
        reason = obstacle_here(config, strategy, devices, gpus)
        state = "not measured" if reason else "planned"
        return PlannedRun(Cell(name, stem, strategy, devices, batch, seed, state, reason), recipe, flags)


def obstacle_here(config: Config, strategy: str, devices: int, gpus: Sequence[str]) -> str:
    """Return why this machine cannot train a run, or an empty string if it can."""
    unavailable = why_unavailable(load_class("strategy", strategy, Strategy), on_gpus=uses_cuda(config.run))
    if unavailable or not uses_cuda(config.run):
        return unavailable
    here = torch.cuda.device_count()
    if gpus and len(gpus) < devices:
        return f"needs {devices} GPUs, but --gpus lists only {len(gpus)}"
    if not gpus and devices > here:
        return f"needs {devices} GPUs, but this machine has {here}"
    return ""


def _words(flag: str, text: SettingValue) -> tuple[str, ...]:
    words = tuple(dict.fromkeys(word.strip() for word in str(text).split(",") if word.strip()))
    if not words:
        raise UserError(f"{flag} {text!r}: the list is empty; specify at least one value")
    return words


def _numbers(flag: str, text: SettingValue, at_least: int) -> tuple[int, ...]:
    words = _words(flag, text)
    for word in words:
        if not word.isdecimal() or int(word) < at_least:
            raise UserError(f"{flag} {text}: {word!r} is not a whole number >= {at_least}")
    return tuple(dict.fromkeys(map(int, words)))


RECORD = "cell.json"  # name of a file in each run's folder


@dataclass(frozen=True)
class CellRecord:
    """The inputs that determine a run in the grid, and how the run was trained."""

    made_from: dict[str, str]
    finished: bool
    side_by_side: bool = False  # whether other runs were trained at the same time, so the run's speed is too low

    @classmethod
    def read(cls, folder: Path) -> CellRecord | None:
        """Return the record in a run's folder, or None if it is missing or cannot be read."""
        content = read_json(folder / RECORD)
        made_from, finished = content.get("made_from"), content.get("finished")
        if not isinstance(made_from, dict) or not isinstance(finished, bool):
            return None
        return cls(made_from, finished, content.get("side_by_side") is True)

    def write(self, folder: Path) -> None:
        """Save the record in a run's folder."""
        write_json(folder / RECORD, asdict(self))


def are_runs(words: Sequence[str]) -> bool:
    """Return whether the arguments are run folders; raise UserError for a mixture of runs and recipes."""
    if not all(words):
        raise UserError("compare: one of the names is empty; list recipes or run folders")
    for word in filter(is_weights_file, words):
        raise UserError(f"{word}: a weights file has no metrics to compare; use its run folder, or `paceline evaluate`")
    folders = [word for word in words if _is_run(word)]
    if folders and len(folders) < len(words):
        other = next(word for word in words if word not in folders)
        raise UserError(f"{other}: not a run folder, but {folders[0]} is one; compare either recipes or runs, not both")
    return bool(folders)


def _is_run(word: str) -> bool:
    """Return whether an argument is a folder; if it is also the name of a recipe, the folder must contain a run."""
    folder = Path(word)
    return folder.is_dir() and (word not in names("recipe") or RunFolder(folder).config_file.is_file())


def finished_cells(folders: Sequence[str], across_recipes: bool) -> list[Cell]:
    """Return one cell of the comparison per run, without duplicates; raise UserError if runs cannot be compared."""
    paths: dict[Path, str] = {}  # the given paths, by resolved path
    for path in map(last_finished, folders):
        paths.setdefault(Path(path).resolve(), path)
    runs = [read_finished(path) for path in paths.values()]
    check_comparable(runs, across_recipes)
    labels = short_names([run.folder for run in runs])
    cells = [_cell_of(run, label) for run, label in zip(runs, labels, strict=True)]
    for group in make_groups(cells).values():
        by_seed: dict[int, str] = {}
        for seed, folder in zip(group.seeds, group.runs, strict=True):
            if by_seed.setdefault(seed, folder) != folder:  # it would count as an additional seed
                which = f"{group.strategy}, seed {seed}"
                raise UserError(f"{by_seed[seed]} and {folder}: the same run twice ({which}); leave one out")
    return cells


def read_finished(path: str) -> Run:
    """Return a run's results; for a stage, make `init_from` relative to the stage's folder.

    With absolute paths, runs that differ only in their seeds would not be in the same group. A run that `--jobs`
    trained at the same time as others has no speed, because they slowed it down.
    """
    run = read_run(path)
    start = str(run.settings.get("init_from", ""))
    stages = find_recipe(run.recipe).stages.values()
    if any({Path(start).name, Path(path).name} <= set(folders) for folders in stages):
        run = replace(run, settings={**run.settings, "init_from": os.path.relpath(start, path)})
    records = [CellRecord.read(folder) for folder in (Path(path), Path(path).parent)]  # the parent's is that of a stage
    if any(record and record.side_by_side for record in records):
        return replace(run, side_by_side=True, speed=None, gpu={})
    return run


def _cell_of(run: Run, label: str) -> Cell:
    again = f"{run.folder.rstrip('/')}-again"
    done = run.finished and (bool(run.quality) or run.speed is not None)
    reason = ""
    if not done and is_folder_locked(Path(run.folder)):
        reason = f"still running, {run.images:,} images so far"
    elif not done:
        reason = "no metrics" if run.finished or not run.images else f"stopped at {run.images:,} images"
    return Cell(
        run.folder,
        Path(run.recipe).stem,
        run.strategy,
        run.devices,
        str(run.batch),
        run.seed,
        state="done" if done else "unfinished",
        reason=reason,
        command=f"paceline {shlex.join(['train', run.recipe, '--config', f'{run.folder}/{CONFIG}', '--out', again])}",
        label=label,
        run=run,
    )


# Settings that do not affect a run's results.
IGNORED_SETTINGS = {"out", "preset", "gpus", "keep", "timeout", "join_timeout", "start_timeout"}
IGNORED_SETTINGS |= {"loggers", "logger_wait"}


def made_from(config: Config) -> dict[str, str]:
    """Return the inputs that determine a run: its settings, and hashes of the user's .py files named in them."""
    settings = {name: str(value) for name, value in config.values().items() if name not in IGNORED_SETTINGS}
    plugins = (config.recipe_name, config.run.data, config.run.strategy, config.run.loader)
    files = [Path(name) for name in plugins if is_path(name)]
    return settings | {f"code in {file}": sha256(file.read_bytes()).hexdigest()[:12] for file in files}


def check_kept(folder: Path, planned: Sequence[PlannedRun]) -> None:
    """Raise UserError if the folder contains runs whose settings or data differ from those of the planned runs."""
    current: dict[str, str] = {}  # the description of the current samples, by recipe
    for one in planned:
        config = one.config
        if config is None or not _has_trained(one.folder):
            continue
        record, now = CellRecord.read(one.folder), made_from(config)
        before = record.made_from if record else now
        names = [name for name in dict.fromkeys([*before, *now]) if before.get(name) != now.get(name)]
        if names:
            changes = "; ".join(f"{name}: {before.get(name, 'none')} → {now.get(name, 'none')}" for name in names)
            raise UserError(
                f"--out {folder}: run {one.cell.name} has different settings ({changes}); choose a different --out"
            )
        was = _samples_of(one.folder)
        if was and config.recipe_name not in current:
            current[config.recipe_name] = ""
            with suppress(UserError, OSError):  # finished runs do not need the data; training reports missing data
                current[config.recipe_name] = describe_samples(open_sources(config)["train"])
        samples = current.get(config.recipe_name, "")
        if was and samples and not is_same_data(was, samples):
            problem = f"run {one.cell.name} was trained on different data ({was} → {samples})"
            raise UserError(f"--out {folder}: {problem}; use the same data to resume, or choose a different --out")


def needs_training(planned: PlannedRun) -> bool:
    """Return whether a run still has to be trained; if not, its cell contains the reason."""
    if planned.config is None:
        return False
    record = CellRecord.read(planned.folder)
    if record and record.finished and record.made_from == made_from(planned.config):
        planned.cell.reason = "already finished"
        return False
    return True


def training_arguments(planned: PlannedRun, options: Options, out: str) -> list[str]:
    """Return the arguments of the `paceline` command that trains a run."""
    arguments = ["train", planned.recipe, "--out", out]
    return arguments + to_arguments(planned.flags, options.config_file, options.assignments)


def start_record(planned: PlannedRun) -> None:
    """Record the inputs of a run that is about to be trained."""
    assert planned.config is not None
    if not _has_trained(planned.folder):  # do not add a record to a run that has already been trained
        CellRecord(made_from(planned.config), finished=False).write(planned.folder)


def record_side_by_side(planned: PlannedRun) -> None:
    """Record that a run is being trained at the same time as others."""
    record = CellRecord.read(planned.folder)
    if record and not record.side_by_side:
        replace(record, side_by_side=True).write(planned.folder)


def read_results(planned: PlannedRun, log: Path, exit_code: int = 0) -> None:
    """Read the results of a run whose command has ended, or the reason for its failure."""
    cell, config = planned.cell, planned.config
    if config is None:
        return
    if exit_code:
        cell.state, cell.reason = "failed", failure_reason(log)
        return
    try:
        cell.run = _read_as_planned(config)
    except (OSError, ValueError, LookupError, TypeError) as error:
        known = isinstance(error, UserError)
        cell.state = "failed"
        cell.reason = str(error) if known else f"the run cannot be read: {type(error).__name__}: {error}"
        return
    CellRecord(made_from(config), finished=True, side_by_side=cell.run.side_by_side).write(planned.folder)
    cell.state = "done"


def _has_trained(folder: Path) -> bool:
    return any(RunFolder(run).checkpoints.all() for run in (folder, *stages_in(folder)))


def _samples_of(folder: Path) -> str:
    """Return the description of the training samples that a run or its first stage recorded, or an empty string."""
    for run in (folder, *stages_in(folder)):
        with suppress(OSError, ValueError):  # errors are reported later, when the run is read completely
            provenance = parse_toml(read_bounded(RunFolder(run).config_file)).get(PROVENANCE)
            samples = provenance.get("data") if isinstance(provenance, dict) else None
            if isinstance(samples, str):
                return samples
    return ""


def _read_as_planned(config: Config) -> Run:
    """Return a run (its last stage if it has stages); raise UserError if it is unfinished or has the wrong length."""
    last = stages_of(config)[-1].run
    run, status = read_finished(last.out), Status.of(Path(last.out))
    images = max(RunFolder(Path(last.out)).checkpoints.all(), default=0)
    problem = ""
    if status is None or status.state != "finished":
        problem = f"an unfinished run ({images:,} images so far)"
    elif (run.settings["epochs"], run.settings["images"]) != (last.epochs, last.images):
        problem = f"a run of a different length ({status.total_images:,} images)"
    elif images != status.total_images:
        problem = f"a run that ended after {images:,} of {status.total_images:,} images"
    if problem:
        raise UserError(f"{last.out}: contains {problem}; choose a different --out")
    return run
