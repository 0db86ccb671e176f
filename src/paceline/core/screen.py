"""The console that commands print to."""

from __future__ import annotations

from typing import IO

from rich.console import Console
from rich.text import Text


def open_screen(*, file: IO[str] | None = None, soft_wrap: bool = False) -> Console:
    """Return a console that prints text literally: [word] is not markup and :word: is not an emoji."""
    return Console(file=file, soft_wrap=soft_wrap, highlight=False, markup=False, emoji=False)


def literal(text: str) -> Text:
    """Return text as rich's `Text`, for functions of rich that parse markup in strings."""
    return Text(text)
