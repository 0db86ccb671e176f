"""What `paceline compare` prints while it trains and measures."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Self

from rich.console import Console

from paceline.compare.cells import PlannedRun
from paceline.core.screen import literal
from paceline.report.model import Cell
from paceline.runs.metrics import METRICS
from paceline.runs.stages import stages_of

LAST_BYTES = 4096  # number of bytes to read from the end of the metrics file; enough for the last line


class Progress:
    """Shows which runs of the grid are being trained, and prints one line for each run that has ended."""

    def __init__(self, console: Console, planned: Sequence[PlannedRun]) -> None:
        self._console = console
        self._numbers = {one.cell.name: number for number, one in enumerate(planned, start=1)}
        self._spinner = console.status("") if console.is_terminal else None

    def __enter__(self) -> Self:
        if self._spinner:
            self._spinner.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._spinner:
            self._spinner.stop()

    def show(self, running: Sequence[PlannedRun]) -> None:
        """Show how many images each run has seen; on a terminal only."""
        if self._spinner:
            self._spinner.update(literal("  ·  ".join(f"{self._words(one.cell)}{_seen(one)}" for one in running)))

    def finish(self, one: PlannedRun) -> None:
        """Print the outcome of a run."""
        cell, words = one.cell, self._words(one.cell)
        if cell.state in ("not measured", "failed"):
            self._console.print(f"{words}: {cell.state}: {cell.reason}", soft_wrap=True)
        elif cell.run is not None:
            alone = cell.run.speed is not None and not cell.run.side_by_side
            speed = f"{cell.run.speed.images_per_second:,.0f} images/s, " if alone and cell.run.speed else ""
            quality = "  ".join(f"{name} {value:.4g}" for name, value in cell.run.quality.items() if value is not None)
            again = " (already finished)" if cell.reason else ""
            cell.reason = ""
            self._console.print(f"{words}: {speed}{cell.run.seconds:.1f} s  {quality}{again}", soft_wrap=True)

    def _words(self, cell: Cell) -> str:
        return f"[{self._numbers[cell.name]}/{len(self._numbers)}] {cell.name}"


@contextmanager
def measuring(console: Console, words: str) -> Iterator[None]:
    """Show what is being measured, as a spinner on a terminal and otherwise as a line of text."""
    if console.is_terminal:
        with console.status(literal(f"{words}: measuring")):
            yield
    else:
        console.print(f"{words}: measuring", soft_wrap=True)
        yield


def _seen(one: PlannedRun) -> str:
    """Return the number of images that a run has seen; for speed, read only the end of the metrics file."""
    assert one.config is not None
    metrics = Path(stages_of(one.config)[0].run.out) / METRICS  # metrics file of the current stage
    if not metrics.is_file():
        return ""
    with metrics.open("rb") as file:
        file.seek(max(0, metrics.stat().st_size - LAST_BYTES))
        seen = re.findall(rb'"images": (\d+)', file.read())
    return f"  {int(seen[-1]):,} images" if seen else ""
