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
        key = _memory_of(tensor)
        if tensor.numel() and key in seen:
            aliases[name] = seen[key]
            continue
        seen[key] = name
        if tensor.dim() == 4 and not tensor.is_contiguous() and tensor.is_contiguous(memory_format=torch.channels_last):
            formats[name] = "channels_last"
        kept[name] = tensor.detach().cpu().contiguous()
    return safetensors.torch.save(kept), {"aliases": aliases, "formats": formats}


def copy_to_host(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Copies on the CPU that nobody else changes; what was aliased is aliased again. Waits for GPUs once."""
    copies: dict[tuple, Tensor] = {}
    named = {}
    for name, tensor in tensors.items():
        key = (*_memory_of(tensor), name if not tensor.numel() else "")
        if key not in copies:
            # Page-locked memory, which torch keeps for the next time: the copies of many tensors need not wait.
            copy = torch.empty_like(tensor.detach(), device="cpu", pin_memory=tensor.is_cuda)
            copies[key] = copy.copy_(tensor.detach(), non_blocking=tensor.is_cuda)
        named[name] = copies[key]
    for device in {tensor.device for tensor in tensors.values() if tensor.is_cuda}:
        torch.cuda.current_stream(device).synchronize()
    return named


def _memory_of(tensor: Tensor) -> tuple:
    return (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())


def unpack(content: bytes, notes: dict[str, Any]) -> dict[str, Tensor]:
    """The tensors in the bytes of a file, on the CPU, under all their names."""
    tensors = safetensors.torch.load(content)
    for name in notes.get("formats", {}):
        tensors[name] = tensors[name].to(memory_format=torch.channels_last)
    for alias, name in notes.get("aliases", {}).items():
        tensors[alias] = tensors[name]
    return tensors
