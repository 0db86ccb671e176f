"""What `paceline compare` prints while it trains and measures."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from rich.console import Console

from paceline.compare.cells import PlannedRun
from paceline.core.activity import end_activity
from paceline.core.numbers import four_digits
from paceline.core.printable import wrapped
from paceline.core.screen import literal
from paceline.core.ticker import Patience
from paceline.report.advice import is_share
from paceline.report.model import Cell
from paceline.runs.metrics import METRICS
from paceline.runs.stages import stages_of
from paceline.runs.status import Status

LAST_BYTES = 4096  # number of bytes to read from the end of the metrics file; enough for the last line


class Progress:
    """Shows which runs of the grid are being trained, and prints one line for each run that has ended.

    A terminal shows the runs in place. Elsewhere, a line is printed when a run starts and at least every 10 seconds.
    """

    def __init__(self, console: Console, planned: Sequence[PlannedRun]) -> None:
        self._console = console
        self._numbers = {one.cell.name: number for number, one in enumerate(planned, start=1)}
        self._spinner = console.status("") if console.is_terminal and not console.is_dumb_terminal else None
        self._patience = Patience()

    def __enter__(self) -> Self:
        end_activity()
        if self._spinner:
            self._spinner.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._spinner:
            self._spinner.stop()

    def begin(self, one: PlannedRun) -> None:
        """Report that training of a run has started."""
        if not self._spinner:
            self._console.print(f"{self._words(one.cell)}: training …", soft_wrap=True)
            self._patience.note_output()

    def show(self, running: Sequence[PlannedRun]) -> None:
        """Show how many images each run has seen."""
        if self._spinner:
            self._spinner.update(literal("\n".join(f"{self._words(one.cell)}: {_seen(one)}" for one in running)))
        elif self._patience.is_over():
            for one in running:
                self._console.print(f"{self._words(one.cell)}: {_seen(one)}", soft_wrap=True)

    def finish(self, one: PlannedRun) -> None:
        """Print the outcome of a run."""
        self._patience.note_output()
        cell, words = one.cell, self._words(one.cell)
        if cell.state in ("not measured", "failed"):
            self._console.print(f"{words}: {cell.state}: {cell.reason}", soft_wrap=True)
        elif cell.run is not None:
            alone = cell.run.speed is not None and not cell.run.side_by_side
            speed = f"{cell.run.speed.images_per_second:,.0f} images/s, " if alone and cell.run.speed else ""
            quality = "  ".join(_text(name, value) for name, value in cell.run.quality.items() if value is not None)
            again = " (already finished)" if cell.reason else ""
            cell.reason = ""
            line = f"{words}: {speed}{cell.run.seconds:.1f} s  {quality}{again}"
            self._console.print(wrapped(line, sys.stdout), soft_wrap=True)

    def _words(self, cell: Cell) -> str:
        return f"[{self._numbers[cell.name]}/{len(self._numbers)}] {cell.name}"


def _text(metric: str, value: float) -> str:
    return f"{metric} {four_digits(value)}{'%' * is_share(metric)}"


def _seen(one: PlannedRun) -> str:
    """Return how many images a run has seen; to be fast, read only the end of the metrics file."""
    assert one.config is not None
    folder = Path(stages_of(one.config)[0].run.out)  # folder of the current stage
    status, metrics = Status.of(folder), folder / METRICS
    if status is None or not metrics.is_file():
        return "starting …"
    with metrics.open("rb") as file:
        file.seek(max(0, metrics.stat().st_size - LAST_BYTES))
        seen = re.findall(rb'"images": (\d+)', file.read())
    return f"{int(seen[-1]) if seen else 0:,} of {status.total_images:,} images"
