"""One-line reprs for dataclasses with many fields."""

from __future__ import annotations

import reprlib
from dataclasses import MISSING, fields
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_VALUES = reprlib.Repr()
_VALUES.maxtuple = 3
_VALUES.maxstring = _VALUES.maxother = 80


def short_repr(instance: DataclassInstance) -> str:
    """Return `Name(field=value, …)` with long values shortened and without fields that have their default value."""
    shown = []
    for field in fields(instance):
        value = getattr(instance, field.name)
        if field.repr and (field.default is MISSING or value != field.default):
            shown.append(f"{field.name}={_VALUES.repr(value)}")
    return f"{type(instance).__name__}({', '.join(shown)})"
