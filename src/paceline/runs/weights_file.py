"""A self-contained weights file: its metadata holds the recipe, its settings and the data spec."""

from __future__ import annotations

import errno
import json
from dataclasses import asdict, dataclass
from pathlib import Path

import safetensors
import safetensors.torch
from torch import Tensor

from paceline.config.named_code import check_named_code
from paceline.config.resolve import Config
from paceline.config.run_format import RUN_FORMAT, check_format
from paceline.contracts.recipe import DataSpec
from paceline.core.errors import UserError
from paceline.core.files import new_file
from paceline.core.small_files import parse_json, why
from paceline.core.trust import check_may_run
from paceline.core.types import SettingValue
from paceline.runs.config import resolve_config
from paceline.runs.data_spec_file import from_json, to_json

SUFFIX = ".safetensors"
FORMAT = "paceline.format"
RECIPE, SETTINGS = "paceline.recipe", "paceline.settings"
PROTOCOL, DATA_SPEC = "paceline.protocol", "paceline.data_spec"
UNREADABLE = (OSError, safetensors.SafetensorError)


@dataclass(frozen=True)
class WeightsFile:
    """The content of a weights file."""

    config: Config
    spec: DataSpec
    weights: dict[str, Tensor]


def write_weights(path: Path, config: Config, spec: DataSpec, weights: dict[str, Tensor]) -> None:
    """Write weights together with everything needed to use them."""
    metadata = {
        "format": "pt",
        FORMAT: str(RUN_FORMAT),
        RECIPE: config.recipe_name,
        SETTINGS: json.dumps(asdict(config.recipe)),
        PROTOCOL: config.run.protocol,
        DATA_SPEC: to_json(spec),
    }
    plain = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in weights.items()}
    with new_file(path) as temporary:
        temporary.write_bytes(safetensors.torch.save(plain, metadata))


def read_weights(path: Path, *, trust: bool = False) -> WeightsFile:
    """Read a weights file; raise UserError if it is not one, or names code to run and `trust` is not given."""
    try:
        weights, metadata = read_tensors(path)
    except UNREADABLE as error:
        raise UserError(f"{path}: cannot be read ({why(error)})") from None
    if RECIPE not in metadata:
        raise UserError(f"{path}: its metadata lists no recipe; use a run folder, or convert it with `paceline import`")
    check_weights_format(metadata, str(path))
    try:
        settings: dict[str, SettingValue] = {**parse_json(metadata[SETTINGS]), "protocol": metadata[PROTOCOL]}
        spec = from_json(metadata[DATA_SPEC])
    except (KeyError, ValueError, TypeError) as error:
        raise UserError(f"{path}: its metadata cannot be read ({type(error).__name__}: {error})") from None
    check_may_run(str(path), [metadata[RECIPE]], trust=trust)
    check_named_code(str(path), settings, trust=trust)
    return WeightsFile(resolve_config(metadata[RECIPE], [(str(path), settings)]), spec, weights)


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors and metadata of any safetensors file; raise OSError or SafetensorError if unreadable."""
    if not path.is_file():
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    with safetensors.safe_open(path, framework="pt") as file:
        metadata: dict[str, str] = file.metadata() or {}
    return safetensors.torch.load_file(path), metadata


def check_weights_format(metadata: dict[str, str], where: str) -> None:
    """Raise UserError if a weights file has a format that this version does not read."""
    check_format(metadata.get(FORMAT), where, remedy="import it again")
