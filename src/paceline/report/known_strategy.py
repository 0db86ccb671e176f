"""What a strategy declares, for strategies that are installed here."""

from __future__ import annotations

from paceline.core.errors import UserError
from paceline.core.registry import load_class, names
from paceline.parallel.strategy import Strategy


def known_strategy(name: str) -> type[Strategy] | None:
    """Return the class of an installed strategy, None for any other.

    A run may come from a stranger: a file that it names as its strategy is not loaded.
    """
    if name not in names("strategy"):
        return None
    try:
        return load_class("strategy", name, Strategy)
    except UserError:  # a plugin that cannot be imported here
        return None
