"""Functions that tests of sharded training run in several ranks, and in one process for comparison."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from paceline.commands.configure import configure
from paceline.commands.verify import trace_strategy
from paceline.core.types import SettingValue

Case = tuple[str, dict[str, SettingValue]]  # a recipe and its settings


def trace_all(folder: str, cases: dict[str, Case], strategy: str, steps: int) -> None:
    """Train each case in float64 under a strategy and write its gradients and weights to FOLDER/NAME.STRATEGY."""
    for name, (recipe, settings) in cases.items():
        flags: dict[str, Any] = {"accelerator": "cpu", **settings}
        config = configure(recipe, flags, small=True).with_run(precision="fp64", strategy=strategy)
        trace_strategy(config, str(Path(folder) / f"{name}.{strategy}"), "", steps)
