"""Weights in one file that is enough by itself: its metadata names the recipe, the settings and the facts."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import safetensors
import safetensors.torch
from torch import Tensor

from paceline.config.resolve import Config
from paceline.contracts.recipe import DataSpec
from paceline.core.errors import UserError
from paceline.runs.config import resolve_config
from paceline.runs.data_spec_file import from_json, to_json

SUFFIX = ".safetensors"
RECIPE, SETTINGS, PROTOCOL, DATA_SPEC = (
    "paceline.contracts.recipe",
    "paceline.config.settings",
    "paceline.protocol",
    "paceline.data_spec",
)


@dataclass(frozen=True)
class WeightsFile:
    """What a file holds."""

    config: Config
    spec: DataSpec
    weights: dict[str, Tensor]


def write_weights(path: Path, config: Config, spec: DataSpec, weights: dict[str, Tensor]) -> None:
    """Writes weights and all that is needed to use them."""
    metadata = {
        "format": "pt",
        RECIPE: config.recipe_name,
        SETTINGS: json.dumps(asdict(config.recipe)),
        PROTOCOL: config.run.protocol,
        DATA_SPEC: to_json(spec),
    }
    plain = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in weights.items()}
    beside = path.with_name(f"{path.name}.writing")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        beside.write_bytes(safetensors.torch.save(plain, metadata))
        beside.rename(path)
    except OSError as error:
        raise UserError(f"--out {path}: {error.strerror}") from None


def read_weights(path: Path) -> WeightsFile:
    """Reads such a file; runs no code of it."""
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
        weights = safetensors.torch.load_file(path)
    except (OSError, safetensors.SafetensorError) as error:
        raise UserError(f"{path}: cannot be read ({str(error).splitlines()[0]})") from None
    if RECIPE not in metadata:
        raise UserError(f"{path}: does not say which recipe it is of; name a run's folder, or `paceline import` it")
    name = metadata[RECIPE]
    try:
        settings = {**json.loads(metadata[SETTINGS]), "protocol": metadata[PROTOCOL]}
        spec = from_json(metadata[DATA_SPEC])
    except (KeyError, ValueError, TypeError) as error:
        raise UserError(f"{path}: its metadata cannot be read ({type(error).__name__}: {error})") from None
    return WeightsFile(resolve_config(name, [(str(path), settings)]), spec, weights)
