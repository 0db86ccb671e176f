"""What a recipe was told of its data, kept with what it learned: enough to build it again without the data."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from paceline.contracts.recipe import DataSpec

DATA_SPEC = "data_spec.json"


def to_json(spec: DataSpec) -> str:
    """The facts as text."""
    return json.dumps(dataclasses.asdict(spec), ensure_ascii=False)


def from_json(text: str) -> DataSpec:
    """The facts that a text holds."""
    values = json.loads(text)
    for name in ("class_names", "panels"):
        values[name] = tuple(values[name])
    return DataSpec(**values)


def write_data_spec(run: Path, spec: DataSpec) -> None:
    """Writes them into a run's folder."""
    beside = run / f"{DATA_SPEC}.writing"
    beside.write_text(to_json(spec))
    beside.rename(run / DATA_SPEC)


def read_data_spec(run: Path) -> DataSpec | None:
    """Those of a run; None where it keeps none, or keeps them in another way."""
    try:
        return from_json((run / DATA_SPEC).read_text())
    except (OSError, ValueError, KeyError, TypeError):
        return None
