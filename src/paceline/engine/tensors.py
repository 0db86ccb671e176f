"""Tensors to files and back: safetensors, never pickle.

safetensors takes contiguous tensors that share no memory. So tensors are written contiguous, with their
memory format beside them, and aliased ones once, with a table of their other names.
"""

from __future__ import annotations

from typing import Any

import safetensors.torch
import torch
from torch import Tensor


def pack(tensors: dict[str, Tensor]) -> tuple[bytes, dict[str, Any]]:
    """The bytes of a safetensors file, and the notes that `unpack` needs."""
    aliases: dict[str, str] = {}
    formats: dict[str, str] = {}
    kept: dict[str, Tensor] = {}
    seen: dict[tuple, str] = {}
    for name, tensor in tensors.items():
        key = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        if tensor.numel() and key in seen:
            aliases[name] = seen[key]
            continue
        seen[key] = name
        if tensor.dim() == 4 and not tensor.is_contiguous() and tensor.is_contiguous(memory_format=torch.channels_last):
            formats[name] = "channels_last"
        kept[name] = tensor.detach().cpu().contiguous()
    return safetensors.torch.save(kept), {"aliases": aliases, "formats": formats}


def unpack(content: bytes, notes: dict[str, Any]) -> dict[str, Tensor]:
    """The tensors in the bytes of a file, on the CPU, under all their names."""
    tensors = safetensors.torch.load(content)
    for name in notes.get("formats", {}):
        tensors[name] = tensors[name].to(memory_format=torch.channels_last)
    for alias, name in notes.get("aliases", {}).items():
        tensors[alias] = tensors[name]
    return tensors
