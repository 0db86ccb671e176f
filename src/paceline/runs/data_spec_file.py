"""The data spec (image size, channels, classes) of a run, saved so that its recipe can be rebuilt without the data."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import get_args

from paceline.contracts.data_spec import written_values
from paceline.contracts.pixel_format import WHITE, PixelType
from paceline.contracts.recipe import DataSpec
from paceline.core.errors import UserError
from paceline.core.files import write_file
from paceline.core.small_files import parse_json, read_bounded, why

DATA_SPEC = "data_spec.json"
LARGEST = 10**6  # upper limit for sizes, channels and classes


def to_json(spec: DataSpec) -> str:
    """Return a data spec as JSON."""
    return json.dumps(written_values(spec), ensure_ascii=False)


def from_json(text: str) -> DataSpec:
    """Parse a data spec from JSON; raise ValueError, KeyError or TypeError if it is invalid."""
    values = parse_json(text)
    for name in ("class_names", "panels"):
        values[name] = tuple(values[name])
        if not all(isinstance(one, str) for one in values[name]):
            raise TypeError(f"{name} contains a value that is not a string")
    for name in ("channels", "height", "width", "num_classes", "scale"):
        if type(values[name]) is not int or not 0 <= values[name] <= LARGEST:
            raise ValueError(f"{name} is not a whole number from 0 to {LARGEST:,}")
    if type(values["flip_allowed"]) is not bool:
        raise TypeError("flip_allowed is neither true nor false")
    if values.get("dtype", "uint8") not in get_args(PixelType):  # runs of older versions have 8-bit images
        raise ValueError(f"dtype is none of {', '.join(get_args(PixelType))}")
    values["value_range"] = _parse_range(values.get("value_range"), values.get("dtype", "uint8"))
    values["empty_classes"] = _parse_empty_classes(values.get("empty_classes", []), values["num_classes"])
    return DataSpec(**values)


def _parse_empty_classes(empty: object, num_classes: int) -> tuple[int, ...]:
    if not isinstance(empty, list) or not all(type(one) is int and 0 <= one < num_classes for one in empty):
        raise TypeError("empty_classes is not a list of class numbers")
    if len(set(empty)) != len(empty) or len(empty) >= max(1, num_classes):
        raise ValueError("empty_classes contains a class twice, or all classes")
    return tuple(empty)


def _parse_range(limits: object, dtype: str) -> tuple[float, float] | None:
    if limits is None and dtype in WHITE:
        return None
    if not isinstance(limits, list) or len(limits) != 2 or not all(type(one) in (int, float) for one in limits):
        raise TypeError("value_range is not a pair of numbers")
    low, high = (float(one) for one in limits)
    if not (math.isfinite(low) and math.isfinite(high) and low < high):
        raise ValueError("value_range is not an increasing pair of finite numbers")
    return low, high


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
