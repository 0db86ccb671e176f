"""The options of `paceline compare` besides the settings of its runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from paceline.config.files import parse_assignments
from paceline.config.resolve import Config
from paceline.core.errors import UserError
from paceline.core.types import SettingValue

Flags: TypeAlias = Mapping[str, SettingValue]  # settings that were given as flags, by name

LISTS = {"seed": "--seeds", "strategy": "--strategies", "devices": "--devices", "batch_size": "--batch-size"}
PER_RUN = LISTS | {"gpus": "--gpus", "out": "--out"}  # settings that each run has for itself, and the flags for them


@dataclass(frozen=True)
class Options:
    """The options of the command; None was not given."""

    strategies: str | None = None
    seeds: str | None = None
    scaling: str | None = None
    verify: bool | None = None
    step_ladder: bool | None = None
    config_file: str = ""
    assignments: tuple[str, ...] = ()

    def given(self) -> list[str]:
        """Return the flags that ask for new runs or further measurements."""
        flags: dict[str, object] = {
            "--strategies": self.strategies,
            "--seeds": self.seeds,
            "--scaling": self.scaling,
            "--verify": self.verify or None,
            "--step-ladder": self.step_ladder or None,
            "--config": self.config_file or None,
            "--set": self.assignments or None,
        }
        return [name for name, value in flags.items() if value is not None]


def check_new(folder: str, flags: Flags, options: Options) -> None:
    """Raise UserError for a flag that applies to new runs, where `folder` holds a finished one."""
    given = [*(_flag(name) for name in flags if name != "out"), *options.given()]
    if given:
        raise UserError(f"{given[0]}: applies to new runs, but {folder} is a finished run; leave it out")


def check_options(flags: Flags, options: Options) -> None:
    """Raise UserError for a setting that is given twice, or once for all runs where each has its own."""
    for name, many in (("seed", options.seeds), ("strategy", options.strategies)):
        if name in flags and many is not None:
            raise UserError(f"--{name} {flags[name]}: cannot be combined with {LISTS[name]}; add it to that list")
    for name in parse_assignments(options.assignments):
        flag = PER_RUN.get(name.replace("-", "_"))
        if flag:
            raise UserError(f"--set {name}: each run of a comparison has its own; use {flag}")


def check_recipes(configs: Mapping[str, Config]) -> None:
    """Raise UserError for recipes that cannot share a table."""
    if not configs:
        raise UserError("compare: no recipe given; name at least one")
    by_stem: dict[str, str] = {}
    for name, config in configs.items():
        other = by_stem.setdefault(Path(name).stem, name)
        if other != name:
            raise UserError(f"{other} and {name} would have the same name in the report; rename one of the files")
        for setting in ("mirror", "resume_from"):
            if getattr(config.run, setting):
                raise UserError(f"{_flag(setting)}: is for one run, but compare makes several; use it with train")
    (name, first), *others = configs.items()
    for other, config in others:
        if config.run.data != first.run.data:
            both = f"{first.run.data} and {config.run.data}"
            raise UserError(f"{name} and {other} would be trained on different data ({both}); choose one with --data")
        recipes = [one.recipe_class for one in (first, config)]
        if recipes[0].best != recipes[1].best or recipes[0].evaluator != recipes[1].evaluator:
            both = " and ".join(recipe.best[0] for recipe in recipes)
            raise UserError(f"{name} and {other} are evaluated by different metrics ({both}) and cannot be compared")


def _flag(setting: str) -> str:
    return f"--{setting.replace('_', '-')}"
