"""Serialise tensors with safetensors, never with pickle.

safetensors stores contiguous tensors that share no memory. So each tensor is made contiguous and its memory format is
recorded separately. Tensors that share memory are stored once, with a table of their aliases.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from paceline.core.small_files import parse_json
from paceline.runs.host_copy import Memory, memory_of

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


def pack(tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> tuple[bytes, TensorNotes]:
    """Return the content of a safetensors file, and the `TensorNotes` that `unpack` needs."""
    notes = find_notes(tensors)
    kept = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items() if name not in notes.aliases}
    content: bytes = safetensors.torch.save(kept)
    aliases = {ALIASES: json.dumps(notes.aliases)} if notes.aliases else {}
    return _with_metadata(content, {**metadata, **aliases}) if metadata else content, notes


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


def _with_metadata(content: bytes, metadata: Mapping[str, str]) -> bytes:
    """Return a safetensors file with metadata in a fixed order; safetensors itself does not guarantee an order."""
    length = int.from_bytes(content[:LENGTH_BYTES], "little")
    header = json.loads(content[LENGTH_BYTES : LENGTH_BYTES + length])
    text = json.dumps({"__metadata__": dict(metadata), **header}, separators=(",", ":")).encode()
    text += b" " * (-len(text) % LENGTH_BYTES)
    return len(text).to_bytes(LENGTH_BYTES, "little") + text + content[LENGTH_BYTES + length :]


def _are_texts(content: object) -> bool:
    return isinstance(content, dict) and all(isinstance(value, str) for value in content.values())
