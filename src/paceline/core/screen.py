"""The terminal that commands print tables and lines on."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.text import Text


def open_screen(**options: Any) -> Console:
    """A terminal on which names, paths and messages stand as they are: no [word] and no :word: of them is an order."""
    return Console(highlight=False, markup=False, emoji=False, **options)


def as_it_is(text: str) -> Text:
    """Text for what would look for orders in a str whatever the terminal says, like a spinner."""
    return Text(text)
