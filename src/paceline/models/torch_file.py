"""Files written by torch.save in other projects: read without executing anything in them."""

from __future__ import annotations

import pickle
import warnings
from pathlib import Path

import torch
from torch import Tensor

from paceline.core.errors import UserError

MAGIC_BYTES = (b"PK\x03\x04", b"\x80")  # a zip archive, and the pickle that older versions of torch wrote
WRAPPERS = ("state_dict", "generator")  # keys under which checkpoints store a network
PREFIX = "generator."  # of a generator's tensors in a checkpoint that holds several networks
DATA_PARALLEL = "module."  # before every name in a network saved inside DataParallel


def read_torch_file(path: Path, named: str) -> object:
    """Return what a file holds, on the CPU; `named` is how the user named it, for messages."""
    try:
        with path.open("rb") as file:
            beginning = file.read(4)
        if not beginning:
            raise UserError(f"{named}: is empty")
        if not beginning.startswith(MAGIC_BYTES):
            raise UserError(f"{named}: was not written by torch.save")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about unusual files, which are rejected here in one line
            content: object = torch.load(path, map_location="cpu", weights_only=True)
            return content
    except UserError:
        raise
    except pickle.UnpicklingError:
        raise UserError(f"{named}: holds more than tensors, and is not read: save its state_dict alone") from None
    except Exception as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise UserError(f"{named}: cannot be read; the file may be truncated ({reason})") from None


def read_state_dict(path: Path) -> dict[str, Tensor]:
    """Return the finite tensors of one network: a bare state_dict, or the generator in a checkpoint."""
    if not path.is_file():
        raise UserError(f"{path}: no such file")
    content = _unwrap(read_torch_file(path, str(path)))
    if not isinstance(content, dict) or not content:
        raise UserError(f"{path}: holds no state_dict")
    tensors: dict[str, Tensor] = {}
    for key, value in content.items():
        if not isinstance(value, Tensor):
            raise UserError(f"{path}: {key!r} is no tensor; expected a state_dict, or one under 'generator'")
        if value.is_floating_point() and not value.isfinite().all():
            raise UserError(f"{path}: {key} holds NaN or infinite numbers; such a network makes no images")
        tensors[str(key).removeprefix(DATA_PARALLEL)] = value
    return tensors


def _unwrap(content: object) -> object:
    """Return the network in what was saved: bare, under its name, or in a Lightning checkpoint."""
    for name in WRAPPERS:
        if isinstance(content, dict) and isinstance(content.get(name), dict):
            content = content[name]
    if isinstance(content, dict) and any(str(key).startswith(PREFIX) for key in content):
        return {str(key).removeprefix(PREFIX): value for key, value in content.items() if str(key).startswith(PREFIX)}
    return content
