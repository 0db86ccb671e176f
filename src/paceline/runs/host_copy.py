"""Copies of tensors in host memory. Copies from a GPU are only started: the training loop does not wait for them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

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
