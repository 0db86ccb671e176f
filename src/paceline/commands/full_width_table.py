"""Tables at their full width, so that their numbers and names are never cut off."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table

WIDEST = 1000  # width in characters, more than any table that a command prints


def print_table(
    console: Console, title: str, headings: Sequence[str], rows: Sequence[Sequence[str]], *, num_texts: int = 0
) -> None:
    """Print a table with its full width; on a terminal that is too narrow for it, print each row as text.

    The first `num_texts` columns contain text instead of numbers, and are aligned to the left.
    """
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 0, 0, 1))
    for number, heading in enumerate(headings):
        table.add_column(heading, justify="left" if number < num_texts else "right")
    for row in rows:
        table.add_row(*row)
    table.width = full_width(console, table)
    if not console.is_terminal or table.width <= console.width:
        console.print(table)
        return
    console.print(f"{title}:")
    for row in rows:
        cells = (cell.replace("\n", " and ") for cell in row)
        console.print("  " + "; ".join(f"{heading}: {cell}" for heading, cell in zip(headings, cells, strict=True)))


def full_width(console: Console, table: Table) -> int:
    """Return the width at which no cell of a table is cut off or wrapped."""
    return console.measure(table, options=console.options.update_width(WIDEST)).maximum
