"""Writes a comparison's report and prints a summary."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.markdown import Markdown

from paceline.core.printable import print_line
from paceline.core.screen import open_screen
from paceline.core.small_files import read_json
from paceline.report.build import write_report
from paceline.report.model import Cell, Report
from paceline.runs.folder import RunFolder

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
