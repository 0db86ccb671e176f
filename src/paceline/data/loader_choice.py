"""Which loader suits a source and a device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch

from paceline.config.settings import RunSettings
from paceline.core.registry import load_class
from paceline.data.loader import Loader
from paceline.data.loaders.resident import Resident
from paceline.data.memory import Budget
from paceline.data.source import Source, decodes

CPU = torch.device("cpu")


class Choice(NamedTuple):
    """A loader by its name, and why; resident data has a home."""

    name: str
    why: str
    home: torch.device | None = None

    def build(self, source: Source, device: torch.device, settings: RunSettings, crop: int = 0) -> Loader:
        """The loader itself."""
        if self.home:
            return Resident(source, device, settings, crop, self.home)
        return load_class("loader", self.name, Loader)(source, device, settings, crop)


def choose_loader(settings: RunSettings, source: Source, device: torch.device, budget: Budget | None = None) -> Choice:
    """The loader to use: in the device's memory, else in the host's, else from the files."""
    if settings.loader not in ("auto", "resident"):
        return Choice(settings.loader, "asked for")
    home, why = _find_home(source, device, budget or Budget(settings.devices))
    if home:
        return Choice("resident", why, home)
    return Choice("workers", why if not decodes(source) else f"{why}; `paceline pack` would save the decoding")


def choose_loaders(
    settings: RunSettings, sources: Mapping[str, Source], device: torch.device
) -> tuple[dict[str, Choice], list[str]]:
    """The choice for each split, from one budget, training first; and a line on it, and on each split that differs."""
    budget = Budget(settings.devices)
    order = sorted(sources, key=lambda split: split != "train")
    choices = {split: choose_loader(settings, sources[split], device, budget) for split in order}
    first = choices[order[0]]
    lines = [f"loader {first.name}: {first.why}"]
    for split, choice in choices.items():
        if (choice.name, choice.home) != (first.name, first.home):
            lines.append(f"loader {choice.name} for {split}: {choice.why}")
    return choices, lines


def _find_home(source: Source, device: torch.device, budget: Budget) -> tuple[torch.device | None, str]:
    """Where a source can stay in memory, the device first, and why; None where it fits nowhere."""
    fits, why = budget.take(source, device)
    if fits or device.type == "cpu":
        return device if fits else None, why
    fits, host_why = budget.take(source, CPU)
    why = f"{why}; {host_why}"
    return (CPU, f"{why}: batches are picked in the host's memory") if fits else (None, why)
