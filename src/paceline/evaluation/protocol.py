"""How a number was measured. Numbers of unlike protocols are not compared."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline.core.errors import UserError

Protocol = Mapping[str, Any]
MAY_DIFFER = {"seed"}  # runs that differ in their seeds are what an average is taken over


def differences(first: Protocol, second: Protocol) -> list[str]:
    """What keeps two protocols from being alike, as `name: one ≠ other`."""
    names = [name for name in dict.fromkeys([*first, *second]) if name not in MAY_DIFFER]
    return [f"{name}: {first.get(name)} ≠ {second.get(name)}" for name in names if first.get(name) != second.get(name)]


def same_protocol(first: Protocol, second: Protocol) -> bool:
    """Whether numbers that were measured so can be compared."""
    return not differences(first, second)


def require_same(protocols: Mapping[str, Protocol]) -> None:
    """Refuses to compare what was not measured alike; the keys say whose numbers they are."""
    (name, first), *others = protocols.items()
    for other, protocol in others:
        found = differences(first, protocol)
        if found:
            raise UserError(f"{name} and {other} were not measured alike and cannot be compared ({'; '.join(found)})")
