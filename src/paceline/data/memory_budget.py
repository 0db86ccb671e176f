"""What the resident data of a run may take of the memory: one budget for all of its splits."""

from __future__ import annotations

import torch

from paceline.data.free_memory import free_bytes
from paceline.data.loaders._pixels import bytes_needed
from paceline.data.source import Source

SHARES = {"cuda": 0.6, "cpu": 0.25}  # of what is free, by the kind of device; the rest is for the model


class Budget:
    """A share of what is free on each kind of device when first asked for; every source that fits takes its part."""

    def __init__(self, processes: int = 1) -> None:
        self.processes = processes  # that share the host's memory; each has a GPU of its own
        self._left: dict[str, int] = {}
        self._taken: set[str] = set()

    def take(self, source: Source, device: torch.device) -> tuple[bool, str]:
        """Whether the source fits in what is left on the device, and why; one that fits has taken its part."""
        kind = device.type
        sharers = self.processes if kind == "cpu" else 1
        if kind not in self._left:
            self._left[kind] = int(free_bytes(device) * SHARES[kind] / sharers)
        needed, left = bytes_needed(source), self._left[kind]
        fits = needed <= left
        reason = (
            f"{_size(needed)} of samples {'fit' if fits else 'do not fit'} in {_size(left)} "
            f"({'left of ' if kind in self._taken else ''}{SHARES[kind]:.0%} of the free "
            f"{'GPU' if kind == 'cuda' else 'host'} memory{f', for {sharers}' if sharers > 1 else ''})"
        )
        if fits:
            self._left[kind] -= needed
            self._taken.add(kind)
        return fits, reason


def _size(count: int) -> str:
    value, unit = (count / 1e9, "GB") if count >= 1e9 else (count / 1e6, "MB")
    return f"{value:,.0f} {unit}" if value >= 10 else f"{value:.2g} {unit}"
