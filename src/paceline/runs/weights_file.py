"""A self-contained weights file: its metadata contains the recipe, its settings and the data spec.

`paceline import` writes such a file, and every checkpoint contains one (`weights.safetensors`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path

import safetensors
from torch import Tensor

from paceline.config.named_code import check_named_code
from paceline.config.resolve import Config, Inherited, flatten
from paceline.config.run_format import RUN_FORMAT, check_format
from paceline.config.settings import SHARED_SETTINGS
from paceline.config.source_flags import FOLDERS
from paceline.contracts.recipe import DataSpec
from paceline.core.errors import UserError
from paceline.core.files import SAFETENSORS, new_file, user_path
from paceline.core.registry import is_path
from paceline.core.small_files import parse_json, why
from paceline.core.trust import check_may_run
from paceline.core.types import SettingValue, SettingValues
from paceline.data.data_name import clean_name, data_name
from paceline.models.torch_file import open_safetensors, read_safetensors
from paceline.runs.config import Layers, load_recipe, resolve_config
from paceline.runs.data_spec_file import from_json, to_json
from paceline.runs.tensors import add_aliases, pack

FORMAT = "paceline.format"
RECIPE, SETTINGS = "paceline.recipe", "paceline.settings"
PROTOCOL, DATA_SPEC = "paceline.protocol", "paceline.data_spec"
DATA = "paceline.data"  # metadata key for the data source and its settings, excluding folder paths
DATA_NAME = "paceline.data_name"  # for the names of metrics that use the weights
DATA_SETTINGS = ("data", "crop", "size", "channels")  # settings that are stored along with the source's own settings
UNREADABLE = (OSError, safetensors.SafetensorError, ValueError)


@dataclass(frozen=True)
class WeightsFile:
    """The content of a weights file."""

    config: Config
    spec: DataSpec
    weights: dict[str, Tensor]
    data_name: str  # name of the training data, without the path


def is_weights_file(path: str) -> bool:
    """Return whether a path is an existing weights file rather than a run folder."""
    place = user_path(path)
    return place.suffix == SAFETENSORS and place.is_file()


def check_checkpoint(path: str, checkpoint: str) -> None:
    """Raise UserError if a checkpoint other than the default is requested; weights files have no checkpoints."""
    if is_weights_file(path) and checkpoint != "best":
        what = f"{path} is a weights file, which has no checkpoints"
        raise UserError(f"--checkpoint {checkpoint}: {what}; use its run folder")


def weights_metadata(recipe: str, settings: SettingValues, spec: DataSpec) -> dict[str, str]:
    """Return the metadata for a weights file; `settings` are all settings of the run, by name."""
    own = {field.name for field in fields(load_recipe(recipe).Settings)}
    # Entries of table settings are named TABLE.ENTRY. Settings of single networks look similar, but are left out.
    of_recipe = {name: value for name, value in flatten(settings).items() if name.partition(".")[0] in own}
    plain = {name: value for name, value in settings.items() if not isinstance(value, Mapping) and "." not in name}
    of_source = plain.keys() - own - SHARED_SETTINGS - {*FOLDERS, "recipe"}
    names = {*DATA_SETTINGS, *of_source}
    if is_path(str(plain.get("data", ""))):  # a source in the user's own file is not stored
        names -= {"data", *of_source}
    return {
        "format": "pt",
        FORMAT: str(RUN_FORMAT),
        RECIPE: recipe,
        SETTINGS: json.dumps(of_recipe),
        PROTOCOL: str(plain.get("protocol", "")),
        DATA: json.dumps({name: value for name, value in plain.items() if name in names}),
        DATA_NAME: data_name(str(plain.get("data", "")), str(plain.get("data_root", ""))),
        DATA_SPEC: to_json(spec),
    }


def write_weights(path: Path, config: Config, spec: DataSpec, weights: dict[str, Tensor]) -> None:
    """Write weights together with everything needed to use them."""
    plain = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in weights.items()}
    content, _ = pack(plain, weights_metadata(config.recipe_name, config.values(), spec))
    with new_file(path) as temporary:
        temporary.write_bytes(content)


def read_weights(path: Path, *, trust: bool = False) -> WeightsFile:
    """Read a weights file; raise UserError if it is not one, or if it refers to untrusted code."""
    try:
        weights, metadata = read_tensors(path)
    except UNREADABLE as error:
        raise UserError(f"{path}: cannot be read ({why(error)})") from None
    config = _config(path, metadata, (), load_source=False, trust=trust)
    try:
        name = clean_name(metadata.get(DATA_NAME, "")) or clean_name(Path(config.run.data).stem)
        return WeightsFile(config, from_json(metadata[DATA_SPEC]), weights, name)
    except (KeyError, ValueError, TypeError) as error:
        raise UserError(f"{path}: its metadata cannot be read ({type(error).__name__}: {error})") from None


def config_of_file(path: Path, layers: Layers, *, load_source: bool, trust: bool) -> Config:
    """Return the settings that the weights in a file were trained with, overridden by `layers`."""
    try:
        metadata = _read_metadata(path)
    except UNREADABLE as error:
        raise UserError(f"{path}: cannot be read ({why(error)})") from None
    return _config(path, metadata, layers, load_source=load_source, trust=trust)


def stored_settings(path: Path) -> tuple[str, SettingValues]:
    """Return the recipe's name and its settings from a file; the name is empty if the file has no such metadata."""
    try:
        metadata = _read_metadata(path)
        settings = parse_json(metadata.get(SETTINGS, "{}"))
    except UNREADABLE as error:
        raise UserError(f"{path}: cannot be read ({why(error)})") from None
    return metadata.get(RECIPE, ""), settings if isinstance(settings, dict) else {}


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors and metadata of any safetensors file; raise one of `UNREADABLE` if that fails."""
    tensors, metadata = read_safetensors(path)
    add_aliases(tensors, metadata)
    return tensors, metadata


def check_weights_format(metadata: dict[str, str], where: str) -> None:
    """Raise UserError if a weights file has a format that this version cannot read."""
    check_format(metadata.get(FORMAT), where, remedy="import it again")


def _read_metadata(path: Path) -> dict[str, str]:
    with open_safetensors(path) as file:
        metadata: dict[str, str] = file.metadata() or {}
    return metadata


def _config(path: Path, metadata: dict[str, str], layers: Layers, *, load_source: bool, trust: bool) -> Config:
    if RECIPE not in metadata:
        raise UserError(
            f"{path}: its metadata does not name a recipe; use a run folder, or convert the file with `paceline import`"
        )
    check_weights_format(metadata, str(path))
    try:
        settings: dict[str, SettingValue] = {**parse_json(metadata[SETTINGS]), "protocol": metadata[PROTOCOL]}
        data: dict[str, SettingValue] = {**parse_json(metadata.get(DATA, "{}"))}
    except (KeyError, ValueError, TypeError) as error:
        raise UserError(f"{path}: its metadata cannot be read ({type(error).__name__}: {error})") from None
    check_may_run(str(path), [metadata[RECIPE]], trust=trust)
    check_named_code(str(path), {**data, **settings}, [layer for _, layer in layers], trust=trust)
    kept: list[tuple[str, SettingValues]] = [(str(path), Inherited(data)), (str(path), settings)]
    return resolve_config(metadata[RECIPE], [*kept, *layers], load_source=load_source)
