"""Open an existing run to use its settings and weights."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from paceline.config.files import NOT_INHERITED
from paceline.config.resolve import Config, Inherited
from paceline.core.errors import UserError
from paceline.core.types import SettingValues
from paceline.data.crop import cropped
from paceline.data.open_sources import open_sources
from paceline.evaluation.contract import OpenedRun
from paceline.runs.checkpoint import choose_checkpoint
from paceline.runs.config import resolve_config
from paceline.runs.folder import RunFolder
from paceline.runs.recipe import make_recipe
from paceline.runs.record import CONFIG
from paceline.runs.weights import load_weights
from paceline.runs.weights_file import config_of_file, is_weights_file, read_weights

MAX_LISTED = 5  # runs listed in one message


def config_of(run: str, layers: Iterable[tuple[str, SettingValues]] = (), *, load_source: bool = True) -> Config:
    """Return the settings that a run or weights file was trained with, overridden by `layers`; see `config.resolve`.

    Raise UserError if there is no run or its format is not supported.
    """
    if is_weights_file(run):
        return config_of_file(Path(run).expanduser(), layers, load_source=load_source)
    folder = RunFolder(Path(run))
    record = folder.read_record(run)
    if record is None:
        raise UserError(f"{run}: not a run folder (it has no {CONFIG}){name_stages(Path(run))}")
    kept = Inherited({name: value for name, value in record.settings.items() if name not in NOT_INHERITED})
    return resolve_config(record.recipe, [(str(folder.config_file), kept), *layers], load_source=load_source)


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
    """Open a run on the CPU with the weights of its best checkpoint, or a weights file."""
    if is_weights_file(run):
        file = read_weights(Path(run).expanduser())
        recipe = file.config.recipe_class(file.config.recipe, file.spec)
        load_weights(recipe, file.weights, ema=True)
        return OpenedRun(file.config, file.spec, recipe)
    config = config_of(run)
    sources = open_sources(config)
    recipe = make_recipe(config, sources)
    load_weights(recipe, choose_checkpoint(RunFolder(Path(run)).checkpoints, "best").weights, ema=True)
    return OpenedRun(config, cropped(sources["train"].spec, config.run.crop), recipe)
