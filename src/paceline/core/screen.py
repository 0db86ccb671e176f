"""The console that commands print to."""

from __future__ import annotations

from typing import IO, Any

from rich.console import Console
from rich.text import Text

from paceline.core.printable import printable_lines


class Screen(Console):
    """A console that escapes control characters in the text it prints.

    `soft_wrap` leaves long lines whole in files and pipes. On a terminal, long lines of text are always broken between
    words, because the terminal itself would break them inside a word.
    """

    def print(self, *objects: Any, soft_wrap: bool | None = None, **options: Any) -> None:
        if self.is_terminal and all(isinstance(one, str | Text) for one in objects):
            soft_wrap = False
        super().print(*objects, soft_wrap=soft_wrap, **options)

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(printable_lines(text), **options)


def open_screen(*, file: IO[str] | None = None, soft_wrap: bool = False) -> Console:
    """Return a console that prints text literally: [word] is not markup and :word: is not an emoji."""
    return Screen(file=file, soft_wrap=soft_wrap, highlight=False, markup=False, emoji=False)


def literal(text: str) -> Text:
    """Return text as a `rich.text.Text`, for functions that would parse markup in a string."""
    return Text(printable_lines(text))
