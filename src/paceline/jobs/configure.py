"""From what a person said to a checked config."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from paceline.config import Config, parse_assignments, read_file, resolve
from paceline.errors import UserError, unknown
from paceline.parallel.environment import check_devices, gpu_ids
from paceline.recipe import Recipe
from paceline.registry import is_path, load, load_class


def configure(
    recipe: str, flags: Mapping[str, Any], *, config_file: str = "", assignments: Iterable[str] = (), small: bool = False
) -> Config:
    """The settings of a run: recipe's defaults (with `small`, its cheap ones) < preset < file < flags < `--set`."""
    for name in [recipe, str(flags.get("data") or "")]:
        if is_path(name):
            print(f"runs the code in {name}")
    recipe_class: type[Recipe] = load_class("recipe", recipe, Recipe)
    from_file = _renamed(read_file(config_file), recipe_class.aliases) if config_file else {}
    from_sets = parse_assignments(assignments)
    preset = from_sets.get("preset") or flags.get("preset") or from_file.get("preset") or ""
    if preset and preset not in recipe_class.presets:
        raise unknown("preset", preset, recipe_class.presets)
    layers = [
        (f"recipe {recipe}", recipe_class.defaults),
        (f"recipe {recipe}", recipe_class.small if small else {}),
        (f"preset {preset}", recipe_class.presets.get(preset, {})),
        (f"--config {config_file}", from_file),
        ("flag", flags),
        ("--set", from_sets),
    ]
    config = resolve(recipe, recipe_class.Settings, layers)
    return checked(config)


def _renamed(settings: Mapping[str, Any], aliases: Mapping[str, str]) -> dict[str, Any]:
    """Settings under our names, where the recipe knows those of another program."""
    named = {aliases.get(name, name): value for name, value in settings.items()}
    named.pop("", None)
    return named


def checked(config: Config) -> Config:
    """The config with its names and devices checked against what is here."""
    run = config.run
    for kind, name in (("source", run.data), ("strategy", run.strategy), ("loader", run.loader)):
        if name != "auto":
            load(kind, name)
    if run.gpus:
        if run.devices not in (1, len(gpu_ids(run))):
            raise UserError(f"--devices {run.devices} and --gpus {run.gpus}: {len(gpu_ids(run))} ids for {run.devices} devices")
        config = config.with_run(devices=len(gpu_ids(run)))
    check_devices(config.run)
    return config
