"""Reads weights that other projects wrote with torch.save or safetensors, without executing any code in them."""

from __future__ import annotations

import errno
import io
import os
import pickle
import pickletools
import re
import sys
import warnings
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import IO, TypeVar

import safetensors.torch
import torch
from torch import Tensor

from paceline.core.errors import UserError
from paceline.core.files import MAX_BYTES, SAFETENSORS, open_bounded, why

TORCH_SUFFIXES = (".pth", ".pt", ".bin")  # files written by torch.save
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
SUPPORTED = re.compile(r"torch\.(float(16|32|64|8_e4m3fn|8_e5m2)|bfloat16|u?int(8|16|32|64)|bool)")
BYTES = (" bytearray", " encode")  # functions that create bytes; some of their arguments need much memory or time
MAX_OPERATIONS = 1_000_000  # in a pickle, which needs about 35 per tensor; they take a few seconds
MAX_TUPLE = 10_000
MAX_DEPTH = 100  # of nested checkpoints
MAX_NAME = 1000  # characters in a tensor's name
# Views can repeat elements, and zip archives can be compressed, so a small file can describe large tensors.
MAX_EXPANSION = 10
Value = TypeVar("Value")


class _Unusable(ValueError):
    """A file is damaged, or has content that cannot be used; the message follows the file's name."""


def describe_import(path: str, recipe: str = "") -> str:
    """Return how to use a file from another project, for a message."""
    flag = f" --recipe {recipe}" if recipe else ""
    return f"to convert weights from another project, use paceline import {path}{flag} --out FILE{SAFETENSORS}"


def read_state_dict(path: Path, named: str = "") -> dict[str, Tensor]:
    """Return the tensors in a state_dict or a checkpoint's generator; raise UserError if any value is not finite.

    Messages refer to the file as `named`, by default its path.
    """
    named = named or str(path)
    if not path.is_file():
        raise UserError(f"{named}: {'expected a file' if path.is_dir() else 'no such file'}")
    try:
        content = _load_safetensors(path) if path.suffix == SAFETENSORS else _unwrap(_read_torch_file(path))
        return _checked(_without_prefixes(content), path.stat().st_size)
    except _Unusable as error:
        raise UserError(f"{named}: {error}") from None
    except pickle.UnpicklingError:
        reason = "contains objects other than tensors, so it was not loaded; save only the state_dict"
        raise UserError(f"{named}: {reason}") from None
    except Exception as error:  # libraries raise many kinds of exceptions for damaged files
        reason = (why(error) or type(error).__name__)[:200]
        raise UserError(f"{named}: cannot be read; the file may be truncated ({reason})") from None


def read_safetensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors and metadata of a safetensors file; raise OSError, ValueError or SafetensorError."""
    with open_safetensors(path) as opened:
        return {name: opened.get_tensor(name) for name in opened.keys()}, opened.metadata() or {}  # noqa: SIM118


def _load_safetensors(path: Path) -> dict[str, Tensor]:
    with open_safetensors(path):  # checks the file
        return safetensors.torch.load(path.read_bytes())  # also makes fake tensors, with which memory is forecast


def open_safetensors(path: Path) -> safetensors.safe_open:
    """Open a safetensors file of a plausible size; raise OSError, ValueError or SafetensorError."""
    with open_bounded(path, sys.maxsize) as file:
        _check_holes(file)
        header_bytes = int.from_bytes(file.read(8), "little")
    if header_bytes > MAX_BYTES:
        raise ValueError(f"its header has {header_bytes:,} bytes, but at most {MAX_BYTES:,} are supported")
    return safetensors.safe_open(path, framework="pt")


def _read_torch_file(path: Path) -> object:
    with open_bounded(path, sys.maxsize) as file, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # an unusable file is reported as a one-line error
        _check_holes(file)
        beginning = file.read(4)
        if not beginning.startswith(MAGIC_BYTES):
            raise _Unusable("was not written by torch.save" if beginning else "the file is empty")
        file.seek(0)
        if beginning.startswith(b"PK"):
            with zipfile.ZipFile(file) as archive:
                members = archive.infolist()
                _check_expansion(sum(member.file_size for member in members), path.stat().st_size)
                for member in members:
                    if member.filename.endswith("data.pkl"):
                        _check_pickle(io.BytesIO(archive.read(member)))
        else:
            for _ in range(4):  # in a file from an older torch version, three numbers or dicts precede the content
                _check_pickle(file)
        file.seek(0)
        content: object = torch.load(file, map_location="cpu", weights_only=True)
        return content


def _checked(state: Mapping[str, object], file_bytes: int) -> dict[str, Tensor]:
    """Return plain tensors with finite values; raise ValueError if there are other values, or none."""
    tensors: dict[str, Tensor] = {}
    num_bytes = 0
    for key, value in state.items():
        if not isinstance(value, Tensor):
            wrappers = " or ".join(map(repr, WRAPPERS))
            raise _Unusable(
                f"{key!r} is not a tensor; expected a state_dict, or a dict that contains one under {wrappers}"
            )
        if value.layout != torch.strided or value.is_meta or not SUPPORTED.fullmatch(str(value.dtype)):
            kind = f"{value.device.type}, {value.layout}, {value.dtype}"
            raise _Unusable(f"{key!r} is not a plain tensor of real numbers ({kind}); save it as torch.float32")
        num_bytes += value.numel() * value.itemsize
        _check_expansion(num_bytes, file_bytes)
        tensors[key] = value.detach().resolve_neg()
        if not _is_finite(tensors[key]):
            raise _Unusable(f"{key} contains NaN or infinite values; use an undamaged file")
    if not tensors:
        raise _Unusable("contains no state_dict")
    return tensors


def _is_finite(tensor: Tensor) -> bool:
    try:
        return bool((tensor.float() if tensor.itemsize == 1 else tensor).isfinite().all())
    except RuntimeError:  # a fake tensor, with which memory is forecast, has no values
        return True


def _check_pickle(file: IO[bytes]) -> None:
    """Raise ValueError if torch.load would need very long or much memory for the next pickle in a file.

    Hashing a tuple whose elements refer to the same tuple, and so on, takes exponential time.
    """
    sizes: list[int] = []  # of the objects on the stack; the size of a tuple includes its elements each time they occur
    marks: list[int] = []
    memo: dict[int | None, int] = {}
    for number, (operation, argument, _) in enumerate(pickletools.genops(file)):
        name, before = operation.name, operation.stack_before
        if number == MAX_OPERATIONS:
            raise _Unusable(f"it takes more than {MAX_OPERATIONS:,} operations to load; save only the state_dict")
        if name == "GLOBAL" and str(argument).endswith(BYTES):
            raise _Unusable("it contains bytes; save only the state_dict")
        if pickletools.markobject in before:
            start = marks.pop() - before.index(pickletools.markobject)
        else:
            start = len(sizes) - len(before)
        size = 1 + sum(sizes[start:]) if name.startswith(("TUPLE", "REDUCE")) else 1
        if size > MAX_TUPLE:
            raise _Unusable("it contains a very large tuple")
        if "PUT" in name or name == "MEMOIZE":
            memo[len(memo) if argument is None else argument] = sizes[-1]
        elif name == "MARK":
            marks.append(len(sizes))
        else:
            sizes[start:] = [memo.get(argument, 1) if "GET" in name else size] * len(operation.stack_after)


def _check_expansion(num_bytes: int, file_bytes: int) -> None:
    if num_bytes > MAX_EXPANSION * file_bytes:
        raise _Unusable(
            f"its content takes {num_bytes:,} bytes, more than {MAX_EXPANSION} times the file's {file_bytes:,}"
        )


def _check_holes(file: IO[bytes]) -> None:
    """Raise ValueError if less than half of a file is stored, as in an incomplete download that reserved its size."""
    size, stored, end = os.fstat(file.fileno()).st_size, 0, 0
    try:
        while 2 * stored < size and end < size:
            start = os.lseek(file.fileno(), end, os.SEEK_DATA)
            end = os.lseek(file.fileno(), start, os.SEEK_HOLE)
            stored += end - start
    except OSError as error:
        if error.errno != errno.ENXIO:  # ENXIO: there is no further data
            return
    os.lseek(file.fileno(), 0, os.SEEK_SET)
    if 2 * stored < size:
        raise ValueError(f"only {stored:,} of its {size:,} bytes are on the disk, so it was not written completely")


def _unwrap(content: object) -> Mapping[str, object]:
    """Return the network's state_dict, which may be bare, under wrapper keys or in a Lightning checkpoint."""
    for _ in range(MAX_DEPTH):
        if not isinstance(content, dict):
            return {}
        names = WRAPPERS if len(content) > 1 else content
        inner = next((content[name] for name in names if isinstance(content.get(name), dict)), None)
        if inner is None:
            return {str(key): value for key, value in content.items()}
        content = inner
    raise _Unusable(f"dicts are nested more than {MAX_DEPTH} deep, or contain themselves")


def _without_prefixes(state: Mapping[str, Value]) -> dict[str, Value]:
    """Remove wrapper prefixes; return only the generator's tensors if any name has the generator's prefix."""
    longest = max(map(len, state), default=0)
    if longest > MAX_NAME:
        raise _Unusable(f"a tensor's name has {longest:,} characters, but at most {MAX_NAME:,} are supported")
    while True:
        prefix = next((prefix for prefix in OUTER_MODULES if all(key.startswith(prefix) for key in state)), PREFIX)
        chosen = {key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)}
        if not chosen:
            return dict(state)
        state = chosen
