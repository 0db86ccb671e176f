"""A protocol describes how a metric was measured. Metrics measured under different protocols are not compared."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

from paceline.core.errors import UserError

Protocol: TypeAlias = Mapping[str, str | int | float]
NUM_GENERATED, NUM_REAL = "made", "real"  # numbers of images in a protocol for generated images
WORDS = {NUM_GENERATED: "generated images", NUM_REAL: "real images"}  # what is printed instead of a key
MAY_DIFFER = {"seed"}  # runs that differ only in their seed are averaged


def differences(first: Protocol, second: Protocol) -> list[str]:
    """Return the keys whose values differ, each as `name: one ≠ other`."""
    names = [name for name in dict.fromkeys([*first, *second]) if name not in MAY_DIFFER]
    return [
        f"{WORDS.get(name, name)}: {first.get(name)} ≠ {second.get(name)}"
        for name in names
        if first.get(name) != second.get(name)
    ]


def require_same(protocols: Mapping[str, Protocol]) -> None:
    """Raise UserError unless all protocols are the same; the keys are run names."""
    (name, first), *others = protocols.items()
    for other, protocol in others:
        found = differences(first, protocol)
        if found:
            raise UserError(f"{name} and {other} were measured differently and cannot be compared ({'; '.join(found)})")
