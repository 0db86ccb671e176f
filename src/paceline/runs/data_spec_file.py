"""The data spec (image size, channels, classes) of a run, saved so that its recipe can be rebuilt without the data."""

from __future__ import annotations

from pathlib import Path

from paceline.contracts.data_spec import parse_spec, written_values
from paceline.contracts.recipe import DataSpec
from paceline.core.errors import UserError
from paceline.core.files import json_text, write_file
from paceline.core.small_files import parse_json, read_bounded, why

DATA_SPEC = "data_spec.json"


def to_json(spec: DataSpec) -> str:
    """Return a data spec as JSON."""
    return json_text(written_values(spec))


def from_json(text: str) -> DataSpec:
    """Parse a data spec from JSON; raise ValueError, KeyError or TypeError if it is invalid."""
    return parse_spec(parse_json(text))


def write_data_spec(run: Path, spec: DataSpec) -> None:
    """Write a data spec to a run folder."""
    write_file(run / DATA_SPEC, to_json(spec), durable=False)


def read_data_spec(run: Path) -> DataSpec:
    """Return the data spec of a run; raise UserError if it cannot be read."""
    file = run / DATA_SPEC
    try:
        return from_json(read_bounded(file).decode())
    except FileNotFoundError:
        raise UserError(f"{file}: the file is missing: restore it, or train the run again") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{file}: cannot be read ({why(error)}): restore the file, or train the run again") from None
