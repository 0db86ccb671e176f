"""The grid of runs in a comparison, its options, and why some of the runs are not possible on this machine."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import NamedTuple, TypeAlias

import torch

from paceline.config.files import parse_assignments
from paceline.config.flags import COMPARE_DEVICES, STRATEGIES
from paceline.config.resolve import Config
from paceline.config.settings import split_batch
from paceline.core.errors import UserError, unknown
from paceline.core.registry import load_class
from paceline.core.types import SettingValue
from paceline.parallel.strategy import Strategy, uses_one_device, why_unavailable
from paceline.parallel.world import uses_cuda
from paceline.report.model import Cell

Flags: TypeAlias = Mapping[str, SettingValue]  # values of the settings that the user gave as flags, by name

LISTS = {"seed": "--seeds", "strategy": "--strategies", "devices": "--devices", "batch_size": "--batch-size"}
PER_RUN = LISTS | {"gpus": "--gpus", "out": "--out"}  # settings that differ between runs, and their flags


@dataclass(frozen=True)
class Options:
    """The options of the command; None for those that the user did not give."""

    strategies: str | None = None
    seeds: str | None = None
    scaling: str | None = None
    jobs: int | None = None  # maximum number of runs to train at the same time
    verify: bool | None = None
    step_ladder: bool | None = None
    config_file: str = ""
    assignments: tuple[str, ...] = ()

    def given(self) -> list[str]:
        """Return the flags given by the user that apply only to new runs or measurements."""
        others = {"config_file": "--config", "assignments": "--set"}
        return [others.get(f.name, _flag(f.name)) for f in fields(self) if getattr(self, f.name)]


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
    if options.jobs is not None and options.jobs < 1:
        raise UserError(f"--jobs {options.jobs}: must be at least 1")
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
        recipes = [one.recipe_class for one in (first, config)]
        if recipes[0].evaluation != recipes[1].evaluation:
            both = " and ".join(recipe.evaluation.best for recipe in recipes)
            raise UserError(
                f"{name} and {other} are evaluated with different metrics ({both}); compare them separately"
            )


def _flag(setting: str) -> str:
    return f"--{setting.replace('_', '-')}"


SCALINGS = ("strong", "weak")


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
        scaling = SCALINGS[0] if options.scaling is None else options.scaling
        if scaling not in SCALINGS:
            raise unknown("--scaling", scaling, SCALINGS)
        chosen = _words("--strategies", STRATEGIES if strategies is None else strategies)
        for name in chosen:
            load_class("strategy", name, Strategy)  # raises UserError for an unknown strategy
        batches = _words("--batch-size", flags.get("batch_size", first.batch_size))
        for batch in batches:
            split_batch(batch, 1, 1)  # raises UserError for an invalid batch size
        devices = _numbers("--devices", flags.get("devices", COMPARE_DEVICES), at_least=1)
        numbers = _numbers("--seeds", first.seed if seeds is None else seeds, at_least=0)
        return cls(tuple(configs), chosen, devices, batches, numbers, scaling == "weak")

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
