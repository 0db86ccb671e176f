"""Dataclasses as JSON: a field is a key, unless its metadata gives another one or leaves it out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from paceline.core.types import Json

_KEY, _OPTIONAL = "key", "optional"
OPTIONAL = {_OPTIONAL: True}  # metadata of a field that is left out where it is None


def key(name: str) -> dict[str, str]:
    """Return the metadata of a field whose key in JSON is not its name."""
    return {_KEY: name}


def as_json(value: Any) -> Json:
    """Return dataclasses, mappings and sequences as what JSON holds."""
    if is_dataclass(value):
        return {
            field.metadata.get(_KEY, field.name): as_json(content)
            for field in fields(value)
            if (content := getattr(value, field.name)) is not None or not field.metadata.get(_OPTIONAL)
        }
    if isinstance(value, Mapping):
        return {str(name): as_json(content) for name, content in value.items()}
    if isinstance(value, list | tuple):
        return [as_json(one) for one in value]
    assert value is None or isinstance(value, str | int | float), value
    return value
