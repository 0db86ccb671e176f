"""What `paceline compare` prints while it trains and measures."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.status import Status as Spinner

from paceline.config.resolve import Config
from paceline.core.screen import literal
from paceline.report.model import Cell
from paceline.runs.metrics import METRICS
from paceline.runs.stages import stages_of

LAST_BYTES = 4096  # number of bytes to read from the end of the metrics file; enough for the last line


@contextmanager
def announced(console: Console, words: str, cell: Cell) -> Iterator[Spinner | None]:
    """Show which run of the grid is being trained, then print one line with its outcome."""
    if console.is_terminal:
        with console.status(literal(words)) as spinner:
            yield spinner
    else:
        yield None
    if cell.state in ("not measured", "failed"):
        console.print(f"{words}: {cell.state}: {cell.reason}", soft_wrap=True)
    elif cell.run is not None:
        speed = f"{cell.run.speed.images_per_second:,.0f} images/s, " if cell.run.speed else ""
        quality = "  ".join(f"{name} {value:.4g}" for name, value in cell.run.quality.items() if value is not None)
        again = " (already finished)" if cell.reason else ""
        cell.reason = ""
        console.print(f"{words}: {speed}{cell.run.seconds:.1f} s  {quality}{again}", soft_wrap=True)


@contextmanager
def measuring(console: Console, words: str) -> Iterator[None]:
    """Show what is being measured, as a spinner on a terminal and otherwise as a line of text."""
    if console.is_terminal:
        with console.status(literal(f"{words}: measuring")):
            yield
    else:
        console.print(f"{words}: measuring", soft_wrap=True)
        yield


def show_progress(spinner: Spinner | None, name: str, config: Config) -> None:
    """Show the number of images seen so far; for speed, read only the end of the metrics file."""
    if spinner is None:
        return
    metrics = Path(stages_of(config)[0].run.out) / METRICS  # metrics file of the current stage
    if not metrics.is_file():
        return
    with metrics.open("rb") as file:
        file.seek(max(0, metrics.stat().st_size - LAST_BYTES))
        seen = re.findall(rb'"images": (\d+)', file.read())
    if seen:
        spinner.update(literal(f"{name}  {int(seen[-1]):,} images"))
