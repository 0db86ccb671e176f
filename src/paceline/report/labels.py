"""Labels for groups: the names that the user gave the runs, or else the properties in which the groups differ."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from paceline.report.group_key import GroupKey

RECIPE, STRATEGY, BATCH = "recipe", "strategy", "batch"
RUN = "run"
MAX_NAMES = 2  # a label with more names shows only the first and the last one


def find_differences(keys: Sequence[GroupKey]) -> dict[GroupKey, dict[str, str]]:
    """Return the properties in which groups differ, by name; the strategy if there is no difference."""
    everything = {key: _properties(key) for key in keys}
    names = list(dict.fromkeys(name for properties in everything.values() for name in properties))
    differing = [name for name in names if len({properties.get(name) for properties in everything.values()}) > 1]
    shown = differing or [STRATEGY]
    return {key: {name: one[name] for name in shown if name in one} for key, one in everything.items()}


def _properties(key: GroupKey) -> dict[str, str]:
    strategy = key.strategy if key.devices == 1 else f"{key.strategy} × {key.devices}"
    strategy += " (on one GPU)" if key.shares_a_gpu else ""
    return {RECIPE: Path(key.recipe).stem, STRATEGY: strategy, BATCH: str(key.batch), **dict(key.extras)}


def label_of(differences: Mapping[str, str]) -> str:
    """Return a label such as `dcgan ddp × 2, batch 64, lr=0.1` that contains only the differences."""
    own = dict(differences)
    start = " ".join(own.pop(name) for name in (RECIPE, STRATEGY) if name in own)
    batch = [f"batch {own.pop(BATCH)}"] if BATCH in own else []
    return ", ".join(filter(None, [start, *batch, *(f"{name}={value}" for name, value in own.items())]))


def heading_of(differences: Sequence[Mapping[str, str]], chosen_by_user: bool) -> str:
    """Return the heading of the column with the labels: what the groups differ in."""
    names = list(dict.fromkeys(name for one in differences for name in one))
    return RUN if chosen_by_user or not names else ", ".join(names)


def join_names(names: Sequence[str]) -> str:
    """Return one label for the runs of a group."""
    return ", ".join(names) if len(names) <= MAX_NAMES else f"{names[0]} … {names[-1]}"


def short_names(folders: Sequence[str]) -> list[str]:
    """Return folder names that are as short as possible but still differ from each other."""
    whole = [os.path.abspath(folder) for folder in folders]
    if len(whole) == 1:
        return [Path(whole[0]).name]
    common = os.path.commonpath([os.path.dirname(folder) for folder in whole])
    return [os.path.relpath(folder, common) for folder in whole]
