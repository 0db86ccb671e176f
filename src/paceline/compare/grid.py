"""Which runs a comparison asks for, and which of them this machine cannot do."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from paceline.config.resolve import Config
from paceline.config.spans import split_batch
from paceline.core.errors import UserError, unknown
from paceline.core.registry import load_class, names
from paceline.parallel.strategy import Strategy
from paceline.parallel.world import uses_cuda
from paceline.report.numbers import Cell


@dataclass(frozen=True)
class Grid:
    """The lists whose combinations are run."""

    recipes: tuple[str, ...]
    strategies: tuple[str, ...]
    devices: tuple[int, ...]
    batches: tuple[str, ...]
    seeds: tuple[int, ...]
    weak: bool  # the batch is per device

    @classmethod
    def parse(
        cls, recipes: Sequence[str], strategies: str, devices: str, batches: str, seeds: str, scaling: str
    ) -> Grid:
        """The lists as a person writes them, with commas; an empty one is refused."""
        if scaling not in ("strong", "weak"):
            raise unknown("--scaling", scaling, ("strong", "weak"))
        chosen = _words("--strategies", strategies)
        for name in chosen:
            if name not in names("strategy"):
                raise unknown("strategy", name, names("strategy"))
        for batch in _words("--batch-size", batches):
            split_batch(batch, 1, 1)  # refuses what is no batch
        return cls(
            tuple(dict.fromkeys(recipes)),
            chosen,
            tuple(_numbers("--devices", devices, at_least=1)),
            _words("--batch-size", batches),
            tuple(_numbers("--seeds", seeds, at_least=0)),
            scaling == "weak",
        )

    def cells(self, configs: Mapping[str, Config]) -> list[tuple[Cell, dict[str, Any]]]:
        """Every cell with its settings; one that cannot run here says why."""
        made = []
        for recipe, batch, strategy in itertools.product(self.recipes, self.batches, self.strategies):
            counts = (1,) if strategy == "single" else self.devices  # single has one device, whatever is asked
            for devices, seed in itertools.product(counts, self.seeds):
                made.append(self._cell(configs[recipe], recipe, strategy, devices, batch, seed))
        return made

    def _cell(
        self, config: Config, recipe: str, strategy: str, devices: int, batch: str, seed: int
    ) -> tuple[Cell, dict[str, Any]]:
        batch = f"{batch}/device" if self.weak and not batch.endswith("/device") else batch
        gpus = config.run.gpus.split(",")[:devices] if config.run.gpus else []
        flags: dict[str, Any] = {"strategy": strategy, "devices": devices, "batch_size": batch, "seed": seed}
        if config.run.gpus:
            flags["gpus"] = ",".join(gpus)
        stem = Path(recipe).stem
        name = f"{stem}-{strategy}-{devices}-batch{batch.replace('/', '-per-')}-seed{seed}"
        if len(set(gpus)) < len(gpus):
            name += "-on-one-gpu"
        cell = Cell(name, stem, strategy, devices, batch, seed)
        cell.reason = why_not_here(config, strategy, devices, gpus)
        cell.state = "not measured" if cell.reason else "wanted"
        return cell, flags


def why_not_here(config: Config, strategy: str, devices: int, gpus: Sequence[str]) -> str:
    """Why this machine cannot do a cell; empty where it can."""
    if not uses_cuda(config.run):
        return load_class("strategy", strategy, Strategy).cpu_obstacle
    here = torch.cuda.device_count()
    if gpus and len(gpus) < devices:
        return f"--gpus names {len(gpus)} for {devices} devices"
    if not gpus and devices > here:
        return "1 GPU here" if here == 1 else f"{here} GPUs here"
    return ""


def _words(flag: str, text: str) -> tuple[str, ...]:
    words = tuple(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))
    if not words:
        raise UserError(f"{flag} {text!r}: names nothing, so there is nothing to run")
    return words


def _numbers(flag: str, text: str, at_least: int) -> list[int]:
    numbers = []
    for word in _words(flag, text):
        if not word.isdigit() or int(word) < at_least:
            raise UserError(f"{flag} {text}: {word!r} is not a whole number of {at_least} or more")
        numbers.append(int(word))
    return numbers
