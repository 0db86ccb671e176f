"""Measures how much memory is free for this process, and limits how much of it samples may use."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch

from paceline.core.host_memory import free_host_bytes
from paceline.data.source import Source
from paceline.data.whole_source import bytes_needed

SHARES = {"cuda": 0.6, "cpu": 0.25}  # fraction of free memory for samples, by device type; the model uses the rest


def free_bytes(device: torch.device) -> int:
    """Return the free memory of a CUDA device, or of the host for any other device."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else free_host_bytes()


class Budget:
    """The memory budget for samples: a fraction of the memory that is free at the start, shared by all sources."""

    def __init__(self, processes: int = 1, free: Mapping[str, int] = MappingProxyType({})) -> None:
        self.processes = processes  # number of processes that share host memory; each has its own GPU
        self.free = free  # free bytes by type of device, if they are not those of this machine
        self._left: dict[str, int] = {}
        self._taken: set[str] = set()

    def take(self, source: Source, device: torch.device) -> tuple[bool, str]:
        """Reserve memory for a source if enough of the budget is left; return whether it is, and an explanation."""
        kind = device.type
        num_sharing = self.processes if kind == "cpu" else 1
        if kind not in self._left:
            free = self.free[kind] if kind in self.free else free_bytes(device)
            self._left[kind] = int(free * SHARES[kind] / num_sharing)
        needed, left = bytes_needed(source), self._left[kind]
        fits = needed <= left
        shared = f", shared by {num_sharing} processes" if num_sharing > 1 else ""
        reason = (
            f"{_size(needed)} of samples {'fit' if fits else 'do not fit'} in {_size(left)} "
            f"({'what remains of ' if kind in self._taken else ''}{SHARES[kind]:.0%} of the free "
            f"{'GPU' if kind == 'cuda' else 'host'} memory{shared})"
        )
        if fits:
            self._left[kind] -= needed
            self._taken.add(kind)
        return fits, reason


def _size(count: int) -> str:
    value, unit = (count / 1e9, "GB") if count >= 1e9 else (count / 1e6, "MB")
    return f"{value:,.0f} {unit}" if value >= 10 else f"{value:.2g} {unit}"
