"""Weights of a recipe: mapped to the names of its parameters, and stored in a self-contained file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path

import safetensors
from torch import Tensor, nn

from paceline.config.files import RUN_FORMAT, check_format, check_named_code
from paceline.config.flags import FOLDERS
from paceline.config.resolve import Config, Inherited, flatten
from paceline.config.settings import SHARED_SETTINGS
from paceline.contracts.data_spec import parse_spec, written_values
from paceline.contracts.recipe import DataSpec, Recipe
from paceline.core.errors import UserError
from paceline.core.files import (
    SAFETENSORS,
    json_text,
    new_file,
    parse_json,
    read_bounded,
    user_path,
    why,
    write_file,
)
from paceline.core.registry import is_path
from paceline.core.trust import check_may_run
from paceline.core.types import SettingValue, SettingValues
from paceline.data.source import clean_name, data_name
from paceline.models.torch_file import open_safetensors, read_safetensors
from paceline.parallel.shards import fill_module
from paceline.runs.recipe import Layers, load_recipe, resolve_config
from paceline.runs.tensor_files import add_aliases, write_tensors

EMA = "ema/"


def load_weights(recipe: Recipe, weights: Mapping[str, Tensor], *, ema: bool = False, where: str = "") -> None:
    """Load weights into a recipe; with `ema`, use the EMAs; see `check_values` for `where`."""
    plain = evaluated_values(weights) if ema else _without_ema(weights)
    check_weights(plain, recipe.state_dict())
    if where:
        check_values(plain, recipe, where)
    fill_module(recipe, plain)


def check_weights(weights: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> None:
    """Raise UserError if the names or shapes of weights differ from those of a network."""
    differing = sorted(weights.keys() ^ own.keys())
    differing += [name for name in weights.keys() & own.keys() if weights[name].shape != own[name].shape]
    if differing:
        raise UserError(
            f"these weights belong to a different network: {differing[0]!r} does not match "
            f"(differing tensors: {len(differing)})"
        )


def check_values(weights: Mapping[str, Tensor], network: nn.Module, where: str) -> None:
    """Raise UserError about `where` if a tensor has another kind of numbers than the network's, or is not finite.

    Floating-point numbers of any precision fit each other. A buffer may be infinite, as the mask of an attention layer.
    """
    for name, own in network.state_dict(keep_vars=True).items():
        if name not in weights:
            continue
        value = weights[name]
        if (value.is_floating_point(), value.is_complex()) != (own.is_floating_point(), own.is_complex()):
            kinds = " instead of ".join(str(tensor.dtype).removeprefix("torch.") for tensor in (value, own))
            raise UserError(f"{where}: {name!r} is {kinds}; convert it, or use another file")
        if has_nan(value) or (isinstance(own, nn.Parameter) and value.to(own.dtype).isinf().any()):
            raise UserError(f"{where}: {name!r} contains NaN or infinite values; use undamaged weights")


def has_nan(tensor: Tensor) -> bool:
    """Return whether a tensor contains NaN; 8-bit numbers are widened first, because torch cannot test them."""
    return bool((tensor.float() if tensor.itemsize == 1 else tensor).isnan().any())


def evaluated_values(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a snapshot's weights by their names in the recipe, using EMAs if available.

    A tensor with several names (tied weights) has one EMA, stored under one of them.
    """
    plain = _without_ema(weights)
    emas = {name.removeprefix(EMA): value for name, value in weights.items() if name.startswith(EMA)}
    of_tensors = {id(plain[name]): value for name, value in emas.items() if name in plain}
    return {name: of_tensors.get(id(value), value) for name, value in plain.items()} | emas


def _without_ema(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: value for name, value in weights.items() if not name.startswith(EMA)}


DATA_SPEC_FILE = "data_spec.json"


def to_json(spec: DataSpec) -> str:
    """Return a data spec as JSON."""
    return json_text(written_values(spec))


def from_json(text: str) -> DataSpec:
    """Parse a data spec from JSON; raise ValueError, KeyError or TypeError if it is invalid."""
    return parse_spec(parse_json(text))


def write_data_spec(run: Path, spec: DataSpec) -> None:
    """Write a data spec to a run folder."""
    write_file(run / DATA_SPEC_FILE, to_json(spec), durable=False)


def read_data_spec(run: Path) -> DataSpec:
    """Return the data spec of a run; raise UserError if it cannot be read."""
    file = run / DATA_SPEC_FILE
    try:
        return from_json(read_bounded(file).decode())
    except FileNotFoundError:
        raise UserError(f"{file}: the file is missing: restore it, or train the run again") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{file}: cannot be read ({why(error)}): restore the file, or train the run again") from None


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
    with new_file(path) as temporary:
        write_tensors(temporary, plain, weights_metadata(config.recipe_name, config.values(), spec))


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
    return _config(path, _read_metadata(path), layers, load_source=load_source, trust=trust)


def stored_settings(path: Path) -> tuple[str, SettingValues]:
    """Return the recipe's name and its settings from a file; the name is empty if the file has no such metadata."""
    metadata = _read_metadata(path)
    try:
        settings = parse_json(metadata.get(SETTINGS, "{}"))
    except ValueError as error:
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
    try:
        with open_safetensors(path) as file:
            metadata: dict[str, str] = file.metadata() or {}
    except UNREADABLE as error:
        raise UserError(f"{path}: cannot be read ({why(error)})") from None
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
