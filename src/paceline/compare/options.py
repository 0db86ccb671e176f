"""The options of `paceline compare`, apart from the settings of its runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from paceline.config.files import parse_assignments
from paceline.config.resolve import Config
from paceline.core.errors import UserError
from paceline.core.types import SettingValue

Flags: TypeAlias = Mapping[str, SettingValue]  # values of the settings that the user gave as flags, by name

LISTS = {"seed": "--seeds", "strategy": "--strategies", "devices": "--devices", "batch_size": "--batch-size"}
PER_RUN = LISTS | {"gpus": "--gpus", "out": "--out"}  # settings that differ between runs, and their flags


@dataclass(frozen=True)
class Options:
    """The options of the command; None for those that the user did not give."""

    strategies: str | None = None
    seeds: str | None = None
    scaling: str | None = None
    verify: bool | None = None
    step_ladder: bool | None = None
    config_file: str = ""
    assignments: tuple[str, ...] = ()
    jobs: int | None = None  # maximum number of runs to train at the same time

    def given(self) -> list[str]:
        """Return the flags given by the user that apply only to new runs or measurements."""
        flags: dict[str, object] = {
            "--strategies": self.strategies,
            "--seeds": self.seeds,
            "--scaling": self.scaling,
            "--jobs": self.jobs,
            "--verify": self.verify or None,
            "--step-ladder": self.step_ladder or None,
            "--config": self.config_file or None,
            "--set": self.assignments or None,
        }
        return [name for name, value in flags.items() if value is not None]


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
        if recipes[0].best != recipes[1].best or recipes[0].evaluator != recipes[1].evaluator:
            both = " and ".join(recipe.best[0] for recipe in recipes)
            raise UserError(
                f"{name} and {other} are evaluated with different metrics ({both}); compare them separately"
            )


def _flag(setting: str) -> str:
    return f"--{setting.replace('_', '-')}"
