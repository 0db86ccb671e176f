"""Helpers for benchmarks that train GANs: rows of a benchmark, curves of the metrics, and results as JSON."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from threading import RLock
from time import perf_counter
from typing import Any, Protocol, TypeVar

from _timed_training import Deadline, Stopped, printed_metrics, read_numbers, run_paceline, summarise

from paceline.core.files import write_json
from paceline.runs.provenance import versions_and_hardware


class Named(Protocol):
    """A row of a benchmark."""

    @property
    def name(self) -> str:
        """The name of the row, of its run folder, and of its entry in the results."""


AnyRow = TypeVar("AnyRow", bound=Named)


def run_rows(
    rows: Sequence[AnyRow], run: Callable[[AnyRow], None], num_jobs: int = 1, after: Callable[[], None] = lambda: None
) -> list[str]:
    """Run all rows, `num_jobs` at a time, and call `after` at the end of each one.

    Return the names of the rows that failed: one that fails, for example because its discriminator collapsed, does not
    keep the others from running.
    """
    failed, is_stopped = [], False
    with ThreadPoolExecutor(num_jobs) as pool:
        futures = {pool.submit(run, row): row for row in rows}
        try:
            for future in as_completed(futures):
                try:
                    future.result()
                except Stopped:
                    is_stopped = True
                except SystemExit as error:
                    failed.append(futures[future].name)
                    print(f"{failed[-1]}: failed ({error})", flush=True)
                after()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
    if is_stopped:
        print("stopped; run the same command again to resume")
    return failed


def train(
    folder: Path,
    words: list[str],
    deadline: Deadline,
    on_evaluation: Callable[[], None] = lambda: None,
    label: str = "",
) -> dict[str, float]:
    """Train a run, or resume it. `on_evaluation` is called after each evaluation; `label` precedes printed lines."""
    start = perf_counter()

    def notice(line: str) -> None:
        if "train/FID" in line:
            on_evaluation()

    run_paceline("train", *words, "--out", str(folder), deadline=deadline, on_line=notice, label=label)
    return summarise(folder, perf_counter() - start)


def curve(folder: Path) -> list[dict[str, float]]:
    """Return the metrics of the evaluations during training, without their split, and the images and seconds."""
    if not (folder / "metrics.jsonl").is_file():
        return []
    return [
        {short_name(name): value for name, value in row.items() if name.startswith("train/")}
        | {"images": row["images"], "seconds": row["seconds"]}
        for row in read_numbers(folder)
        if any(name.startswith("train/FID") for name in row)
    ]


def short_name(metric: str) -> str:
    """Return a metric's name without its split: FID[pixels-8x8] for train/FID[pixels-8x8]."""
    return metric.partition("/")[2]


def name_in(row: dict[str, float], metric: str) -> str | None:
    """Return a metric's name with the network its features come from: FID[pixels-8x8] for FID."""
    return next((name for name in row if name.partition("[")[0] == metric), None)


def value_of(row: dict[str, float], metric: str) -> float | None:
    """Return a metric's value, whichever network its features come from."""
    name = name_in(row, metric)
    return row[name] if name else None


def points_of(rows: Sequence[dict[str, float]], metric: str) -> list[tuple[float, float]]:
    """Return a curve as (images, value) pairs, without evaluations whose value is missing or not a number."""
    values = [(row["images"], value_of(row, metric)) for row in rows]
    return [(images, value) for images, value in values if value is not None and math.isfinite(value)]


def evaluate(folder: Path, words: list[str]) -> dict[str, float]:
    """Return the metrics of the last checkpoint."""
    return printed_metrics(run_paceline("evaluate", str(folder), "--checkpoint", "last", *words))


class Results:
    """A JSON file with one entry per row of the benchmark; written after each change.

    Each entry has the versions and the hardware with which it was last changed.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.lock = path, RLock()
        self.content: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {"rows": {}}
        self.provenance = versions_and_hardware()

    def row(self, name: str) -> dict[str, Any]:
        """Return the entry of a row, which is empty at first."""
        row: dict[str, Any] = self.content["rows"].get(name, {})
        return row

    def update(self, name: str, /, **values: Any) -> None:
        """Add values to a row and write the file."""
        with self.lock:
            row: dict[str, Any] = self.content["rows"].setdefault(name, {})
            row.update(values, provenance=self.provenance)
            self.write()

    def write(self) -> None:
        """Write the file, so that it is complete at any time."""
        with self.lock:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_json(self.path, self.content, indent=1)


def data_words(root: Path) -> list[str]:
    """Return the options for a folder of CIFAR-10, or for an .npz file with x_train, y_train, x_test and y_test."""
    return ["--data", "npz" if root.suffix == ".npz" else "cifar10", "--data-root", str(root)]


def copy_samples(folder: Path, path: Path) -> None:
    """Copy the last grid of samples that a run wrote."""
    shutil.copyfile(max((folder / "samples").glob("*.png")), path)
