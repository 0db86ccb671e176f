"""The data spec that a recipe was built with, kept in its run: it can be built again without the data."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from paceline.contracts.recipe import DataSpec
from paceline.core.errors import UserError
from paceline.core.files import write_file

DATA_SPEC = "data_spec.json"


def to_json(spec: DataSpec) -> str:
    """Return a data spec as text."""
    return json.dumps(dataclasses.asdict(spec), ensure_ascii=False)


def from_json(text: str) -> DataSpec:
    """Return the data spec in a text; raise ValueError, KeyError or TypeError where it holds none."""
    values = json.loads(text)
    for name in ("class_names", "panels"):
        values[name] = tuple(values[name])
    return DataSpec(**values)


def write_data_spec(run: Path, spec: DataSpec) -> None:
    """Write a data spec into a run's folder."""
    write_file(run / DATA_SPEC, to_json(spec), durable=False)


def read_data_spec(run: Path) -> DataSpec:
    """Return the data spec of a run; raise UserError where it cannot be read."""
    file = run / DATA_SPEC
    try:
        return from_json(file.read_text())
    except FileNotFoundError:
        raise UserError(f"{file}: is missing: restore the file, or train the run again") from None
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise UserError(f"{file}: cannot be read ({error}): restore the file, or train the run again") from None
