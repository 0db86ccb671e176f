"""Tensors in safetensors files, never pickle, and their copies in host memory."""

from __future__ import annotations

import errno
import json
import math
import mmap
import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from paceline.core.files import parse_json, sync_open
from paceline.models.torch_file import open_safetensors

Memory = tuple[int, torch.dtype, torch.Size, tuple[int, ...]]


def memory_of(tensor: Tensor) -> Memory:
    """Return where a tensor is stored; two tensors with the same result are aliases."""
    return (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())


class HostCopy:
    """Copies tensors to the CPU, preserving aliases. Later operations on the current CUDA streams do not affect them.

    The tensors may be changed or freed as soon as the constructor returns. Call `wait` before reading the copies.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        copies: dict[tuple[Memory, str], Tensor] = {}
        self._named: dict[str, Tensor] = {}
        for name, tensor in tensors.items():
            key = (memory_of(tensor), name if not tensor.numel() else "")
            if key not in copies:
                # Pinned memory makes the copies asynchronous. torch caches it for the next call.
                copy = torch.empty_like(tensor.detach(), device="cpu", pin_memory=tensor.is_cuda)
                copies[key] = copy.copy_(tensor.detach(), non_blocking=tensor.is_cuda)
            self._named[name] = copies[key]
        devices = {one.device for one in tensors.values() if one.is_cuda}
        self._copied = {device: _record(device) for device in devices}

    def wait(self) -> dict[str, Tensor]:
        """Wait until the copies are complete, and return them by name; any thread may call this."""
        for device, event in self._copied.items():
            with torch.cuda.device(device):  # otherwise, a new thread would take memory on GPU 0
                event.synchronize()
        return self._named


def _record(device: torch.device) -> torch.cuda.Event:
    # The waiting thread sleeps: a thread that polls would take the GIL from the training loop.
    event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call, unused-ignore]
    event.record(torch.cuda.current_stream(device))  # type: ignore[no-untyped-call, unused-ignore]
    return event


CHANNELS_LAST = "channels_last"
ALIASES = "paceline.aliases"  # metadata key; with it, a file can be used without its `TensorNotes`
LENGTH_BYTES = 8  # size of the header length field at the start of a safetensors file


@dataclass(frozen=True)
class TensorNotes:
    """Properties of tensors that a safetensors file cannot store, by tensor name."""

    aliases: dict[str, str] = field(default_factory=dict)  # alias → name in the file
    formats: dict[str, str] = field(default_factory=dict)  # tensor name → memory format, if not contiguous

    @classmethod
    def from_json(cls, content: object) -> TensorNotes:
        """Parse the notes; raise TypeError or ValueError if they are invalid."""
        if not isinstance(content, dict) or not all(_are_texts(values) for values in content.values()):
            raise TypeError("the tensor metadata is not a JSON object with string values")
        if set(content.get("formats", {}).values()) - {CHANNELS_LAST}:
            raise ValueError("the tensor metadata contains an unknown memory format")
        return cls(**content)


def find_notes(tensors: Mapping[str, Tensor]) -> TensorNotes:
    """Return the properties of tensors that a safetensors file cannot store."""
    notes = TensorNotes()
    seen: dict[Memory, str] = {}
    for name, tensor in tensors.items():
        key = memory_of(tensor)
        if tensor.numel() and key in seen:
            notes.aliases[name] = seen[key]
            continue
        seen[key] = name
        if tensor.dim() == 4 and not tensor.is_contiguous() and tensor.is_contiguous(memory_format=torch.channels_last):
            notes.formats[name] = CHANNELS_LAST
    return notes


def unpack(content: bytes, notes: TensorNotes) -> dict[str, Tensor]:
    """Return the tensors in a safetensors file on the CPU, including aliases; raise ValueError if they are invalid."""
    try:
        tensors: dict[str, Tensor] = safetensors.torch.load(content)
    except SafetensorError as error:
        raise ValueError(str(error)) from None
    return apply_notes(tensors, notes)


def apply_notes(tensors: dict[str, Tensor], notes: TensorNotes) -> dict[str, Tensor]:
    """Restore memory formats and add aliases to the tensors of a file; raise ValueError if the notes do not match."""
    if (
        not notes.formats.keys() | set(notes.aliases.values()) <= tensors.keys()
        or notes.aliases.keys() & tensors.keys()
    ):
        raise ValueError("the tensors do not match the metadata")
    if any(tensors[name].dim() != 4 for name in notes.formats):
        raise ValueError("a tensor without four dimensions cannot be channels-last")
    for name in notes.formats:
        tensors[name] = tensors[name].to(memory_format=torch.channels_last)
    for alias, name in notes.aliases.items():
        tensors[alias] = tensors[name]
    return tensors


def add_aliases(tensors: dict[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Add the aliases that the metadata lists for stored tensors; raise ValueError if the metadata is invalid."""
    aliases = parse_json(metadata.get(ALIASES, "{}"))
    if not _are_texts(aliases):
        raise ValueError(f"{ALIASES} is not a JSON object with string values")
    for alias, name in aliases.items():
        if name not in tensors:
            raise ValueError(f"{ALIASES} refers to {name!r}, which is missing")
        tensors[alias] = tensors[name]


def _are_texts(content: object) -> bool:
    return isinstance(content, dict) and all(isinstance(value, str) for value in content.values())


DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
    torch.complex64: "C64",
}
_TORCH_DTYPES = {name: dtype for dtype, name in DTYPES.items()}
BYTES_AT_ONCE = 2**26
CANNOT_RESERVE = (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS)  # from file systems that cannot preallocate


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> TensorNotes:
    """Write a new safetensors file; return the notes that `unpack` needs."""
    notes = reserve(path, tensors, metadata)
    write_rows(path, tensors, {})
    return notes


def reserve(
    path: Path,
    tensors: Mapping[str, Tensor],
    metadata: Mapping[str, str],
    whole: Mapping[str, tuple[int, ...]] | None = None,
) -> TensorNotes:
    """Create a file with room for tensors, and return their notes; raise OSError if the disk is full.

    `whole` is the shape of each tensor of which this process has only some rows.
    """
    notes = find_notes(tensors)
    aliases = {ALIASES: json.dumps(notes.aliases)} if metadata and notes.aliases else {}
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()} | dict(whole or {})
    kept = {name: (tensors[name].dtype, shapes[name]) for name in tensors if name not in notes.aliases}
    header, end = _header(kept, {**metadata, **aliases})
    with _opened(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC) as file:
        try:
            os.posix_fallocate(file, 0, len(header) + end)
        except OSError as error:
            if error.errno not in CANNOT_RESERVE:
                raise
            os.ftruncate(file, len(header) + end)
        _write_at(file, memoryview(header), 0)
    return notes


def write_rows(path: Path, tensors: Mapping[str, Tensor], first: Mapping[str, int]) -> None:
    """Write tensors to a reserved file and sync it; `first` is the position of the first row, 0 by default.

    Tensors that the header does not list are left out, since they share the memory of a listed tensor.
    """
    with _opened(path, os.O_RDWR) as file:
        length = int.from_bytes(os.pread(file, LENGTH_BYTES, 0), "little")
        header = json.loads(os.pread(file, length, LENGTH_BYTES))
        for name in (name for name in tensors if name in header):
            rows = tensors[name].detach().cpu().contiguous()
            skipped = first.get(name, 0) * math.prod(rows.shape[1:]) * rows.element_size()
            at = LENGTH_BYTES + length + header[name]["data_offsets"][0] + skipped
            _write_at(file, rows.reshape(-1).view(torch.uint8).numpy().data, at)
        sync_open(file)


def map_tensors(path: Path) -> dict[str, Tensor]:
    """Return the tensors in a file without reading them: the system reads the parts that are used, when they are used.

    Raise ValueError, KeyError or SafetensorError if the file is invalid. The tensors must not be changed.
    """
    with open_safetensors(path):  # checks the header, which may come from an untrusted source
        pass
    with _opened(path, os.O_RDONLY) as file:
        content = mmap.mmap(file, 0, access=mmap.ACCESS_READ)  # a writable mapping could exceed the memory limit
    start = LENGTH_BYTES + int.from_bytes(content[:LENGTH_BYTES], "little")
    header = json.loads(content[LENGTH_BYTES:start])
    header.pop("__metadata__", None)
    return {name: _map_tensor(content, start, **entry) for name, entry in header.items()}


def _map_tensor(content: mmap.mmap, start: int, dtype: str, shape: list[int], data_offsets: list[int]) -> Tensor:
    kind, count = _TORCH_DTYPES[dtype], math.prod(shape)
    if not count:
        return torch.empty(shape, dtype=kind)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        return torch.frombuffer(content, dtype=kind, count=count, offset=start + data_offsets[0]).reshape(shape)


def _header(
    tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]], metadata: Mapping[str, str]
) -> tuple[bytes, int]:
    """Return the header with its length, and the size of the data; larger dtypes come first, so all are aligned."""
    entries: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name, (dtype, shape) in sorted(tensors.items(), key=lambda item: (-item[1][0].itemsize, item[0])):
        begin, end = end, end + math.prod(shape) * dtype.itemsize
        entries[name] = {"dtype": DTYPES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % LENGTH_BYTES)
    return len(text).to_bytes(LENGTH_BYTES, "little") + text, end


@contextmanager
def _opened(path: Path, flags: int) -> Iterator[int]:
    file = os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    try:
        yield file
    finally:
        os.close(file)


def _write_at(file: int, content: memoryview, position: int) -> None:
    while content:
        count = os.pwrite(file, content[:BYTES_AT_ONCE], position)
        content, position = content[count:], position + count
