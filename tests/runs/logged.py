"""What a run has logged: the lines of its metrics, and its IDs in the services of its loggers."""

from __future__ import annotations

import json
from pathlib import Path

from paceline.runs.logger import LOGGER_RUNS

Point = tuple[str, int, float]  # name, step and value


def run_id(folder: Path, logger: str) -> str:
    return str(json.loads((folder / LOGGER_RUNS).read_text())[logger]["id"])


def lines_of(folder: Path) -> list[Point]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    clocks = ("images", "seconds", "time")
    return sorted((name, row["images"], value) for row in rows for name, value in row.items() if name not in clocks)
