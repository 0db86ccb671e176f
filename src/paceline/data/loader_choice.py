"""Chooses the loader for a source and a device."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch

from paceline.config.settings import RunSettings
from paceline.core.errors import UserError
from paceline.core.registry import load_class, load_classes
from paceline.data.loader import Loader
from paceline.data.memory import Budget
from paceline.data.source import Source
from paceline.data.subset import decodes

AUTO = "auto"


class Choice(NamedTuple):
    """The name of a loader, why it was chosen, and the device that will store all samples, if any."""

    name: str
    reason: str
    home: torch.device | None = None

    def build(self, source: Source, device: torch.device, settings: RunSettings, crop: int = 0) -> Loader:
        """Construct the loader."""
        return load_class("loader", self.name, Loader)(source, device, settings, crop, self.home)


def choose_loader(settings: RunSettings, source: Source, device: torch.device, budget: Budget | None = None) -> Choice:
    """Return the loader in the settings or, if it is "auto" or not suitable, the first suitable loader."""
    budget = budget or Budget(settings.devices)
    obstacles: list[str] = []
    for name in _candidates(settings.loader):
        fit = load_class("loader", name, Loader).fits(source, device, budget)
        if not fit.ok:
            obstacles.append(fit.reason)
            continue
        advice = ["use `paceline pack` to avoid decoding"] if obstacles and not fit.home and decodes(source) else []
        reasons = [*obstacles, *([fit.reason] if fit.reason else []), *advice]
        return Choice(name, "; ".join(reasons) or ("requested" if name == settings.loader else "automatic"), fit.home)
    raise UserError(f"--loader {settings.loader}: no loader can load this data: {'; '.join(obstacles)}")


def choose_loaders(
    settings: RunSettings, sources: Mapping[str, Source], device: torch.device
) -> tuple[dict[str, Choice], list[str]]:
    """Choose a loader for each split, training first, within one memory budget; also return lines to print."""
    budget = Budget(settings.devices)
    order = sorted(sources, key=lambda split: split != "train")
    choices = {split: choose_loader(settings, sources[split], device, budget) for split in order}
    first = choices[order[0]]
    lines = [f"loader {first.name}: {first.reason}"]
    for split, choice in choices.items():
        if (choice.name, choice.home) != (first.name, first.home):
            lines.append(f"loader {choice.name} for {split}: {choice.reason}")
    return choices, lines


def _candidates(wanted: str) -> Iterator[str]:
    """Yield the names of the loaders to try: the one in the settings, then those that "auto" tries, in order."""
    if wanted != AUTO:
        yield wanted
    orders = {name: loader.auto_order for name, loader in load_classes("loader", Loader).items() if name != wanted}
    yield from sorted((name for name, order in orders.items() if order is not None), key=lambda name: orders[name] or 0)
