"""What `paceline compare` prints while it trains and measures, and at the end."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Self

from rich.console import Console
from rich.markdown import Markdown

from paceline.compare.cells import PlannedRun
from paceline.core.files import read_json
from paceline.core.terminal import Patience, end_activity, literal, open_screen
from paceline.core.text import four_digits, print_line, wrapped
from paceline.report.build import write_report
from paceline.report.model import Cell, Report
from paceline.report.wording import is_share
from paceline.runs.finished_run import stages_of
from paceline.runs.folder import RunFolder
from paceline.runs.metrics import METRICS
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


REPORT = "report.json"


@contextmanager
def only_writer(folder: Path) -> Iterator[None]:
    """Lock a comparison's folder, so that two comparisons cannot write to it at the same time."""
    claimed = RunFolder(folder)
    claimed.claim()
    try:
        yield
    finally:
        claimed.release()


def title_of(recipes: Sequence[str], data: str) -> str:
    """Return the title of a report that compares these recipes."""
    return f"{' against '.join(recipes)} on {Path(data).stem}"


def has_report(folder: Path) -> bool:
    """Return whether a folder contains a report with finished runs."""
    counts = read_json(folder / REPORT).get("counts")
    return isinstance(counts, dict) and bool(counts.get("done"))


def finish(report: Report, folder: Path) -> None:
    """Write the report, then print its summary and its path."""
    replaced = _replaced_runs(folder, report.cells)
    summary = write_report(report, folder)
    console = open_screen()
    console.print()
    for sentence in summary:
        console.print(Markdown(sentence))
    if replaced:
        print_line(f"this report replaces one that included other runs: {', '.join(replaced)}")
    print(f"report: {folder / 'report.html'}")


def _replaced_runs(folder: Path, cells: Sequence[Cell]) -> list[str]:
    """Return the runs in the folder's previous report that are not among the runs in `cells`."""
    before = read_json(folder / REPORT).get("runs")
    own = {Path(cell.run.folder).resolve() for cell in cells if cell.run is not None}
    return [name for name in before if Path(name).resolve() not in own] if isinstance(before, dict) else []
