"""Open an existing run to use its settings and weights, or to start another stage from it."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch

from paceline.config.files import check_named_code, inherited
from paceline.config.resolve import Config, Inherited, flatten, plain_name, resolve
from paceline.config.settings import SHARED_SETTINGS
from paceline.contracts.recipe import Recipe
from paceline.core.errors import NOT_FOUND, UserError
from paceline.core.files import SAFETENSORS, user_path
from paceline.core.text import print_line
from paceline.core.trust import check_may_run, may_run
from paceline.core.types import SettingValue, SettingValues
from paceline.data.fingerprint import describe_samples, is_same_data
from paceline.data.source import data_name, open_sources, open_training_samples
from paceline.data.stream import cropped
from paceline.evaluation.contract import OpenedRun
from paceline.models.torch_file import TORCH_SUFFIXES, describe_import
from paceline.parallel.world import World
from paceline.runs.checkpoint import choose_checkpoint
from paceline.runs.folder import RunFolder
from paceline.runs.metrics import read_metrics
from paceline.runs.recipe import Layers, make_recipe, resolve_config
from paceline.runs.record import CONFIG, RunRecord, read_record
from paceline.runs.weights import config_of_file, is_weights_file, load_weights, read_weights, stored_settings

MAX_LISTED = 5  # maximum number of runs listed in one message


def config_of(run: str, layers: Layers = (), *, load_source: bool = True, trust: bool = False) -> Config:
    """Return the training settings from a run or weights file, overridden by `layers`; see `config.resolve`.

    Raise UserError if there is no run, its format is not supported, or it refers to untrusted code.
    """
    layers = list(layers)
    if is_weights_file(run):
        return config_of_file(user_path(run), layers, load_source=load_source, trust=trust)
    record = _record_of(run)
    kept = inherited(record.settings)
    check_may_run(run, [record.recipe], trust=trust)
    if load_source:
        check_named_code(run, kept, [layer for _, layer in layers], trust=trust)
    return resolve_config(record.recipe, [(str(Path(run) / CONFIG), kept), *layers], load_source=load_source)


def readable_config_of(run: str, *, trust: bool = False) -> Config:
    """Return a run's settings without running untrusted code; an untrusted recipe's own settings are left out."""
    if is_weights_file(run):
        return config_of(run, load_source=False, trust=trust)
    record = _record_of(run)
    if may_run(record.recipe, trust=trust):
        return config_of(run, load_source=False, trust=trust)
    kept = flatten(inherited(record.settings))
    known = {name: value for name, value in kept.items() if plain_name(name.rpartition(".")[2]) in SHARED_SETTINGS}
    layers = [(str(Path(run) / CONFIG), Inherited(known))]
    return resolve(record.recipe, Recipe, layers, load_source=False)


def check_not_file(run: str) -> None:
    """Raise UserError if a path is a file, but not a weights file."""
    place = user_path(run)
    if place.exists() and not place.is_dir() and not is_weights_file(run):
        advice = f"; {describe_import(run)}" if place.suffix in TORCH_SUFFIXES else ""
        raise UserError(f"{run}: expected a run folder or a {SAFETENSORS} file{advice}")


def is_training_data(run: str, config: Config) -> bool:
    """Return whether the training samples under `config` are those of a run; False for a weights file."""
    if is_weights_file(run):
        return False
    try:
        return is_same_data(_record_of(run).provenance.data, describe_samples(open_training_samples(config)))
    except (UserError, OSError):  # other data may have too few samples for a run, or different folders
        return False


def _record_of(run: str) -> RunRecord:
    check_not_file(run)
    record = read_record(user_path(run), run)
    if record is None and not user_path(run).exists():
        raise UserError(f"{run}: {NOT_FOUND}")
    if record is None:
        raise UserError(f"{run}: not a run folder (it has no {CONFIG}){name_stages(Path(run))}")
    return record


def name_stages(folder: Path) -> str:
    """Return the end of an error message that lists the runs in a folder; empty if there are none."""
    runs = stages_in(folder)
    listed = ", ".join(map(str, runs[:MAX_LISTED]))
    more = f" and {len(runs) - MAX_LISTED} more" if len(runs) > MAX_LISTED else ""
    return f"; choose one of the runs in it: {listed}{more}" if runs else ""


def stages_in(folder: Path) -> list[Path]:
    """Return the runs in a folder, sorted by name."""
    return sorted(file.parent for file in folder.glob(f"*/{CONFIG}"))


def open_run(run: str) -> OpenedRun:
    """Open a weights file, or a run with the weights of its best checkpoint, on the CPU."""
    if is_weights_file(run):
        file = read_weights(user_path(run))
        recipe = file.config.recipe_class(file.config.recipe, file.spec)
        load_weights(recipe, file.weights, ema=True, where=run)
        return OpenedRun(file.config, file.spec, recipe, file.data_name)
    config = config_of(run)
    sources = open_sources(config)
    recipe = make_recipe(config, sources)
    best = choose_checkpoint(RunFolder(user_path(run)).checkpoints, "best")
    load_weights(recipe, best.weights, ema=True, where=run)
    spec = cropped(sources["train"].spec, config.run.crop)
    return OpenedRun(config, spec, recipe, data_name(config.run.data, config.run.data_root))


def stages_of(config: Config, world: World | None = None) -> list[Config]:
    """Return the configs of the runs that remain: the config itself or, for a recipe with stages, one per stage.

    A stage is skipped once the next stage has started from its best weights. If each host has its own disk, a stage
    that has started on one host counts as started on all. The other hosts may have been replaced, or may have failed
    before they wrote a file.
    """
    names = config.recipe_class.stages.get(getattr(config.recipe, "stage", ""), ())
    if not names:
        return [config]
    folders = [Path(config.run.out) / name for name in names]
    starts = [config.run.init_from, *map(str, folders)]
    stages = [
        dataclasses.replace(
            config.with_run(
                out=str(folder),
                init_from=start,
                mirror=_subfolder(config.run.mirror, name),
                resume_from=_subfolder(config.run.resume_from, name),
            ),
            recipe=dataclasses.replace(config.recipe, stage=name),
        )
        for name, folder, start in zip(names, folders, starts, strict=False)
    ]
    started = max(
        (number for number, folder in enumerate(folders) if RunFolder(folder).config_file.exists()), default=0
    )
    if world:
        started = int(world.gather(torch.tensor([started], device=world.device)).max())
    return stages[started:]


def last_finished(path: str, *, trust: bool = False) -> str:
    """Return the last finished stage in a folder of stages; return any other path unchanged."""
    place = user_path(path)
    if RunFolder(place).config_file.exists():
        return path
    runs = stages_in(place)
    if not runs:
        return path
    stages = readable_config_of(str(runs[0]), trust=trust).recipe_class.stages
    started = [place / name for names in stages.values() for name in names if place / name in runs]
    for number, folder in reversed(list(enumerate(started))):
        if _has_ever_finished(folder):
            for later in started[number + 1 :]:
                print_line(f"{later} has not finished: using {folder}", sys.stderr)
            return str(folder)
    return path


def _has_ever_finished(run: Path) -> bool:
    """Return whether a run has ever finished; the metrics of a resumed run still contain its final evaluation."""
    return RunFolder(run).has_finished or any("test/checkpoint_images" in line for line in read_metrics(run))


def _subfolder(url: str, name: str) -> str:
    return f"{url.rstrip('/')}/{name}" if url else ""


INIT_FROM, OUT = "init_from", "out"


def stored_network(recipe: str, names: Sequence[str], layers: Iterable[SettingValues]) -> dict[str, SettingValue]:
    """Return the settings `names` of the weights that a run starts from, if their network comes from another library.

    The first name is the setting for the network. If the user or a preset sets it, nothing is returned. A run that is
    resumed does not need the initial weights, so its own folder is used if they no longer exist.
    """
    given: dict[str, SettingValue] = {}
    for layer in layers:
        given |= flatten(layer)
    if not names or not given.get(INIT_FROM) or names[0] in given:
        return {}
    stored: dict[str, SettingValue] = {}
    for place in (given[INIT_FROM], given.get(OUT, "")):
        stored = stored or _settings_of(str(place), recipe)
    found = {name: value for name, value in stored.items() if name.partition(".")[0] in names}
    return found if ":" in str(found.get(names[0], "")) else {}


def _settings_of(path: str, recipe: str) -> dict[str, SettingValue]:
    """Return the settings of a weights file or run by full name; empty if it cannot be read or has another recipe."""
    place = user_path(path)
    try:
        if path and is_weights_file(path):
            of_recipe, settings = stored_settings(place)
        elif path and place.is_dir() and (record := RunFolder(place).read_record()):
            of_recipe, settings = record.recipe, record.settings
        else:
            return {}
    except UserError:  # training reports the problem when it reads the weights
        return {}
    return flatten(settings) if of_recipe == recipe else {}
