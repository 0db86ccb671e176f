"""A safetensors file that several processes write together, and of which each process reads only what it uses.

The header is written first, then each process writes its rows in place.
"""

from __future__ import annotations

import errno
import json
import math
import mmap
import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from paceline.models.torch_file import open_safetensors
from paceline.runs.tensors import LENGTH_BYTES

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
}
_TORCH_DTYPES = {name: dtype for dtype, name in DTYPES.items()}
BYTES_AT_ONCE = 2**26
CANNOT_RESERVE = (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS)  # from file systems that cannot preallocate


def reserve(
    path: Path, tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]], metadata: Mapping[str, str]
) -> None:
    """Create a file with room for tensors of these dtypes and shapes; raise OSError if the disk is full."""
    header, end = _header(tensors, metadata)
    with _opened(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL) as file:
        try:
            os.posix_fallocate(file, 0, len(header) + end)
        except OSError as error:
            if error.errno not in CANNOT_RESERVE:
                raise
            os.ftruncate(file, len(header) + end)
        _write_at(file, memoryview(header), 0)


def write_rows(path: Path, tensors: Mapping[str, Tensor], first: Mapping[str, int]) -> None:
    """Write tensors to a reserved file and sync it; `first` is the position of the first row, 0 by default.

    Tensors that the header does not list are left out, since they share the memory of a listed tensor.
    """
    with _opened(path, os.O_RDWR) as file:
        length = int.from_bytes(os.pread(file, LENGTH_BYTES, 0), "little")
        header = json.loads(os.pread(file, length, LENGTH_BYTES))
        for name in (name for name in tensors if name in header):
            rows = tensors[name].detach().contiguous()
            skipped = first.get(name, 0) * math.prod(rows.shape[1:]) * rows.element_size()
            at = LENGTH_BYTES + length + header[name]["data_offsets"][0] + skipped
            _write_at(file, rows.reshape(-1).view(torch.uint8).numpy().data, at)
        os.fsync(file)


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
