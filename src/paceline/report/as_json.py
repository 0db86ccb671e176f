"""Conversion of dataclasses to JSON: each field becomes a key."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from paceline.core.types import Json

OPTIONAL = {"optional": True}  # marks a dataclass field that is omitted from the JSON if it is None


def as_json(value: Any) -> Json:
    """Convert dataclasses, mappings and sequences to JSON objects and arrays."""
    if is_dataclass(value):
        return {
            field.name: as_json(content)
            for field in fields(value)
            if (content := getattr(value, field.name)) is not None or not field.metadata.get("optional")
        }
    if isinstance(value, Mapping):
        return {str(name): as_json(content) for name, content in value.items()}
    if isinstance(value, list | tuple):
        return [as_json(one) for one in value]
    assert value is None or isinstance(value, str | int | float), value
    return value
