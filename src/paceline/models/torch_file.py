"""Reads weights that other projects wrote with torch.save or safetensors, without executing any code in them."""

from __future__ import annotations

import pickle
import warnings
from pathlib import Path

import safetensors.torch
import torch
from torch import Tensor

from paceline.core.errors import UserError
from paceline.core.files import SAFETENSORS

# The first bytes of a zip archive, and of the pickle that older torch versions write.
MAGIC_BYTES = (b"PK\x03\x04", b"\x80")
# Keys under which checkpoints store a network, possibly nested. If a level has several of them, the first is used. If a
# level has a single key with any other name, that key is used.
WRAPPERS = (
    *("params_ema", "params-ema", "state_dict_ema", "params"),
    *("generator", "model_state_dict", "state_dict", "model", "net"),
)
PREFIX = "generator."  # prefix of the generator's tensors in a checkpoint with several networks
OUTER_MODULES = ("module.", "_orig_mod.")  # added to every name by DataParallel and by torch.compile


def read_torch_file(path: Path, named: str) -> object:
    """Load a file's content onto the CPU; messages refer to the file as `named`."""
    try:
        with path.open("rb") as file:
            beginning = file.read(4)
        if not beginning:
            raise UserError(f"{named}: the file is empty")
        if not beginning.startswith(MAGIC_BYTES):
            raise UserError(f"{named}: was not written by torch.save")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # an unusable file is reported as a one-line error below
            content: object = torch.load(path, map_location="cpu", weights_only=True)
            return content
    except UserError:
        raise
    except pickle.UnpicklingError:
        raise UserError(
            f"{named}: contains objects other than tensors, so it was not loaded; save only the state_dict"
        ) from None
    except Exception as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise UserError(f"{named}: cannot be read; the file may be truncated ({reason})") from None


def read_state_dict(path: Path) -> dict[str, Tensor]:
    """Return the tensors in a state_dict or a checkpoint's generator; raise UserError if any value is not finite."""
    if not path.is_file():
        raise UserError(f"{path}: no such file")
    content = _read_safetensors(path) if path.suffix == SAFETENSORS else _unwrap(read_torch_file(path, str(path)))
    if not isinstance(content, dict) or not content:
        raise UserError(f"{path}: contains no state_dict")
    tensors: dict[str, Tensor] = {}
    for key, value in content.items():
        if not isinstance(value, Tensor):
            raise UserError(
                f"{path}: {key!r} is not a tensor; expected a state_dict, or a dict that contains one under "
                f"{' or '.join(map(repr, WRAPPERS))}"
            )
        if value.is_floating_point() and not value.isfinite().all():
            raise UserError(f"{path}: {key} contains NaN or infinite values; use an undamaged file")
        tensors[key] = value
    return tensors


def _read_safetensors(path: Path) -> object:
    try:
        return _without_prefixes({**safetensors.torch.load_file(path)})
    except Exception as error:
        raise UserError(f"{path}: cannot be read; the file may be truncated ({error})") from None


def _unwrap(content: object) -> object:
    """Return the network's state_dict, which may be bare, under wrapper keys or in a Lightning checkpoint."""
    while isinstance(content, dict):
        names = WRAPPERS if len(content) > 1 else content
        inner = next((content[name] for name in names if isinstance(content.get(name), dict)), None)
        if inner is None:
            return _without_prefixes({str(key): value for key, value in content.items()})
        content = inner
    return content


def _without_prefixes(state: dict[str, object]) -> dict[str, object]:
    """Remove wrapper prefixes; return only the generator's tensors if any name has the generator's prefix."""
    for prefix in OUTER_MODULES:
        if state and all(key.startswith(prefix) for key in state):
            return _without_prefixes({key.removeprefix(prefix): value for key, value in state.items()})
    chosen = {key.removeprefix(PREFIX): value for key, value in state.items() if key.startswith(PREFIX)}
    return _without_prefixes(chosen) if chosen else state
