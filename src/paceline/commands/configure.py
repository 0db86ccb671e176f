"""Build a checked config, and choose a device, from the user's flags and files."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping

import torch

from paceline.config.files import check_named_code, check_trusting_setting, parse_assignments, read_file
from paceline.config.resolve import Config, Inherited
from paceline.config.settings import RunSettings
from paceline.core.errors import UnknownSetting, UserError, missing, unknown
from paceline.core.files import user_path
from paceline.core.registry import is_installed, load_class
from paceline.core.text import reject_credentials
from paceline.core.types import SettingValues
from paceline.data.loader import Loader
from paceline.data.source import Source
from paceline.parallel.group import place_of
from paceline.parallel.strategy import Strategy
from paceline.parallel.world import check_devices, gpu_ids, uses_cuda
from paceline.runs.finished_run import stored_network
from paceline.runs.recipe import load_recipe, resolve_config, resolve_settings


def configure(
    recipe: str,
    flags: SettingValues,
    *,
    config_file: str = "",
    assignments: Iterable[str] = (),
    small: bool = False,
    elsewhere: bool = False,
) -> Config:
    """Return a run's checked settings.

    Each of these overrides the ones before it: the recipe's defaults, its `small` settings if requested, the network of
    the `--init-from` weights if it comes from another library, the preset, the settings file, flags and `--set`. If
    `elsewhere` is true, the run is for other machines, so this machine is not checked for the requested devices.
    """
    recipe_class = load_recipe(recipe)
    from_file = _renamed(read_file(config_file), recipe_class.other_names) if config_file else {}
    from_sets = parse_assignments(assignments)
    check_named_code(f"--config {config_file}", from_file, [flags, from_sets])
    check_trusting_setting(f"--config {config_file}", from_file)
    preset = next((str(layer["preset"]) for layer in (from_sets, flags, from_file) if "preset" in layer), "")
    if preset and preset not in recipe_class.presets:
        if preset == from_file.get("preset"):
            _check_recipe_of_file(config_file, from_file, recipe)
        raise unknown("preset", preset, recipe_class.presets)
    user_layers = (recipe_class.presets.get(preset, {}), from_file, flags, from_sets)
    stored = stored_network(recipe, recipe_class.weights.network_settings, user_layers)
    layers: list[tuple[str, SettingValues]] = [
        (f"recipe {recipe}", Inherited(recipe_class.defaults)),
        (f"recipe {recipe}", Inherited(recipe_class.small if small else {})),
        ("--init-from", Inherited(stored)),
        (f"preset {preset}", Inherited(recipe_class.presets.get(preset, {}))),
        (f"--config {config_file}", from_file),
        ("flag", flags),
        ("--set", from_sets),
    ]
    try:
        config = resolve_config(recipe, layers)
    except UnknownSetting as error:
        if error.origin == f"--config {config_file}":
            _check_recipe_of_file(config_file, from_file, recipe)
        raise
    return checked(config, elsewhere=elsewhere)


def _check_recipe_of_file(config_file: str, settings: SettingValues, recipe: str) -> None:
    """Raise UserError if a settings file that does not fit the recipe is for another recipe."""
    other = settings.get("recipe", recipe)
    if other != recipe:
        raise UserError(
            f"--config {config_file}: is for recipe {other!r} and has settings that {recipe!r} does not have; "
            f"use recipe {other!r}, or copy the settings that both have into a new file"
        )


def _renamed(settings: SettingValues, other_names: Mapping[str, str]) -> SettingValues:
    """Translate other programs' names for settings; drop settings with an empty translation."""
    renamed = {name: new if " " not in (new := other_names.get(name, name)) else name for name in settings}
    named = {new: settings[name] for name, new in renamed.items() if new or not name}
    return Inherited(named) if isinstance(settings, Inherited) else named


def checked(config: Config, *, elsewhere: bool = False) -> Config:
    """Check a config's plugins and, unless the run is for other machines, its devices; set the number of devices."""
    run = config.run
    load_class("source", run.data, Source)
    if run.strategy != "auto":
        strategy = load_class("strategy", run.strategy, Strategy)
        if not elsewhere and not is_installed(strategy.package):
            raise UserError(f"--strategy {run.strategy}: {missing(strategy.package, strategy.extra)}")
    if run.loader != "auto":
        load_class("loader", run.loader, Loader)
    reject_credentials(config.values())
    if run.out:
        config = config.with_run(out=str(user_path(run.out)))
    return config if elsewhere else config.with_run(devices=available_devices(config.run))


def available_devices(run: RunSettings) -> int:
    """Return the number of devices; raise UserError if this machine, `--gpus` or the started processes have others."""
    devices, why = _num_devices(run)
    if run.devices not in (1, devices):
        raise UserError(f"--devices {run.devices}: {why}; use --devices {devices} or leave it out")
    check_devices(dataclasses.replace(run, devices=devices))
    return devices


def _num_devices(run: RunSettings) -> tuple[int, str]:
    """Return the number of devices and the reason for it: the number of started processes, or the IDs in `--gpus`."""
    place = place_of(run)
    if place:
        return place.size, f"differs from the number of processes that were started ({place.size})"
    if run.gpus:
        ids = gpu_ids(run)
        return len(ids), f"differs from the number of IDs in --gpus {run.gpus}"
    return run.devices, ""


def choose_device(command: str, accelerator: str) -> torch.device:
    """Return the device given by `--accelerator`: by default, a GPU if there is one."""
    settings = resolve_settings(command, [("flag", {"accelerator": accelerator or "auto"})])
    check_devices(settings)
    return torch.device("cuda:0" if uses_cuda(settings) else "cpu")
