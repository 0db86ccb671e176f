"""Helpers for benchmarks that train GANs: curves of the metrics, and results as JSON."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

from _timed_training import Deadline, printed_metrics, run_paceline, summarise

from paceline.core.files import write_json
from paceline.runs.metrics import read_metrics
from paceline.runs.provenance import versions_and_hardware


def train(
    folder: Path, words: list[str], deadline: Deadline, on_evaluation: Callable[[], None] = lambda: None
) -> dict[str, float]:
    """Train a run, or resume it. `on_evaluation` is called after each evaluation."""
    start = perf_counter()

    def notice(line: str) -> None:
        if "train/FID" in line:
            on_evaluation()

    run_paceline("train", *words, "--out", str(folder), deadline=deadline, on_line=notice)
    return summarise(folder, perf_counter() - start)


def curve(folder: Path) -> list[dict[str, float]]:
    """Return the metrics of the evaluations during training, without the network's name, and the images and seconds."""
    if not (folder / "metrics.jsonl").is_file():
        return []
    return [
        {short_name(name): value for name, value in row.items() if name.startswith("train/")}
        | {"images": row["images"], "seconds": row["seconds"]}
        for row in read_metrics(folder)
        if any(name.startswith("train/FID") for name in row)
    ]


def short_name(metric: str) -> str:
    """Return a metric's name without its split: FID[pixels-8x8] for train/FID[pixels-8x8]."""
    return metric.partition("/")[2]


def value_of(row: dict[str, float], metric: str) -> float | None:
    """Return a metric's value, whichever network its features come from."""
    return next((value for name, value in row.items() if name.partition("[")[0] == metric), None)


def evaluate(folder: Path, words: list[str]) -> dict[str, float]:
    """Return the metrics of the last checkpoint."""
    return printed_metrics(run_paceline("evaluate", str(folder), "--checkpoint", "last", *words))


class Results:
    """A JSON file with versions, hardware, and one entry per row of the benchmark; written after each change."""

    def __init__(self, path: Path, **options: Any) -> None:
        self.path = path
        self.content: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {"rows": {}}
        self.content |= {"provenance": versions_and_hardware(), "options": options}
        self.write()

    def row(self, name: str) -> dict[str, Any]:
        """Return the entry of a row, which is empty at first."""
        row: dict[str, Any] = self.content["rows"].setdefault(name, {})
        return row

    def update(self, name: str, /, **values: Any) -> None:
        """Add values to a row and write the file."""
        self.row(name).update(values)
        self.write()

    def write(self) -> None:
        """Write the file, so that it is complete at any time."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_json(self.path, self.content, indent=1)


def data_words(root: Path) -> list[str]:
    """Return the options for a folder of CIFAR-10, or for an .npz file with x_train, y_train, x_test and y_test."""
    return ["--data", "npz" if root.suffix == ".npz" else "cifar10", "--data-root", str(root)]


def copy_samples(folder: Path, path: Path) -> None:
    """Copy the last grid of samples that a run wrote."""
    shutil.copyfile(max((folder / "samples").glob("*.png")), path)
