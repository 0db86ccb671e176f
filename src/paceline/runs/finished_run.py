"""Open an existing run to use its settings and weights."""

from __future__ import annotations

from pathlib import Path

from paceline.config.files import inherited
from paceline.config.named_code import check_named_code
from paceline.config.resolve import Config, Inherited, flatten, plain_name, resolve
from paceline.config.settings import SHARED_SETTINGS
from paceline.contracts.recipe import Recipe
from paceline.core.errors import NOT_FOUND, UserError
from paceline.core.files import SAFETENSORS, user_path
from paceline.core.trust import check_may_run, may_run
from paceline.data.crop import cropped
from paceline.data.data_name import data_name
from paceline.data.fingerprint import describe_samples, is_same_data
from paceline.data.open_sources import open_sources, open_training_samples
from paceline.data.source_settings import RegisteredSources
from paceline.evaluation.contract import OpenedRun
from paceline.models.torch_file import TORCH_SUFFIXES, describe_import
from paceline.runs.checkpoint import choose_checkpoint
from paceline.runs.config import Layers, resolve_config
from paceline.runs.folder import RunFolder
from paceline.runs.recipe import make_recipe
from paceline.runs.record import CONFIG, RunRecord, read_record
from paceline.runs.weights import load_weights
from paceline.runs.weights_file import config_of_file, is_weights_file, read_weights

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
    return resolve(record.recipe, Recipe, layers, RegisteredSources(), load_source=False)


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
