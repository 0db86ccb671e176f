"""Lookup of installed strategies."""

from __future__ import annotations

from paceline.core.errors import UserError
from paceline.core.registry import load_class, names
from paceline.parallel.strategy import Strategy


def known_strategy(name: str) -> type[Strategy] | None:
    """Return the class of an installed strategy, or None if it is not installed.

    Strategies in user files are never loaded, because a run folder may come from an untrusted source.
    """
    if name not in names("strategy"):
        return None
    try:
        return load_class("strategy", name, Strategy)
    except UserError:  # the plugin cannot be imported
        return None
