"""Helpers for benchmarks that train GANs for a given time: commands that stop in time, curves, results as JSON."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import median
from time import monotonic, perf_counter
from typing import Any, NamedTuple

from paceline.core.files import write_json
from paceline.runs.metrics import read_metrics
from paceline.runs.provenance import versions_and_hardware

GRACE_S = 60  # after this time, a command that does not stop is killed; it resumes from its last checkpoint


class Stopped(Exception):
    """The time of this part is over; the same command continues."""


class Deadline:
    """The time at which a benchmark stops. Minutes of 0 mean that it does not stop."""

    def __init__(self, minutes: float) -> None:
        self.end = monotonic() + 60 * minutes if minutes else float("inf")

    def check(self) -> None:
        """Raise Stopped if the time is over."""
        if self.left() <= 0:
            raise Stopped

    def left(self) -> float:
        """Return the time left, in seconds."""
        return self.end - monotonic()


def run_paceline(*words: str, deadline: Deadline | None = None, on_line: Callable[[str], None] | None = None) -> str:
    """Run a command and return its output. At the deadline, stop it as with Ctrl-C, and raise Stopped.

    Training saves a checkpoint when it is stopped. `on_line` is called with each line of output.
    """
    print("$ paceline", *words, flush=True)
    process = subprocess.Popen([sys.executable, "-m", "paceline", *words], stdout=subprocess.PIPE, text=True)
    stopped = threading.Event()

    def stop() -> None:
        stopped.set()
        process.send_signal(signal.SIGINT)

    timers = []
    if deadline is not None and deadline.left() < float("inf"):
        left = max(0.1, deadline.left())
        timers = [threading.Timer(left, stop), threading.Timer(left + GRACE_S, process.kill)]
    for timer in timers:
        timer.start()
    lines = []
    assert process.stdout
    try:
        for line in process.stdout:
            print(line, end="", flush=True)
            lines.append(line)
            if on_line is not None:
                on_line(line)
        code = process.wait()
    finally:
        for timer in timers:
            timer.cancel()
        if process.poll() is None:  # an error in this script must not leave the command running
            process.terminate()
            process.wait()
    if stopped.is_set():
        raise Stopped
    if code:
        sys.exit(code)
    return "".join(lines)


def sets(assignments: Iterable[str]) -> list[str]:
    """Return settings as command-line arguments."""
    return [word for assignment in assignments for word in ("--set", assignment)]


class Trained(NamedTuple):
    """The length of a run, and its speed without the first steps, which are slower."""

    images: int
    training_seconds: float
    process_seconds: float  # of this part
    images_per_second: float


def train(
    folder: Path, words: list[str], deadline: Deadline, on_evaluation: Callable[[], None] = lambda: None
) -> Trained:
    """Train a run, or resume it. `on_evaluation` is called after each evaluation."""
    start = perf_counter()

    def notice(line: str) -> None:
        if "train/FID" in line:
            on_evaluation()

    run_paceline("train", *words, "--out", str(folder), deadline=deadline, on_line=notice)
    rows = read_metrics(folder)
    speeds = [row["time/images_per_second"] for row in rows if "time/images_per_second" in row]
    return Trained(
        int(max(row["images"] for row in rows)),
        float(rows[-1]["seconds"]),
        perf_counter() - start,
        median(speeds[len(speeds) // 4 :]) if speeds else 0.0,
    )


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
    printed = run_paceline("evaluate", str(folder), "--checkpoint", "last", *words)
    fields = (line.split() for line in printed.splitlines() if line.startswith("  "))
    return {words[0]: float(words[1].replace(",", "")) for words in fields if len(words) == 2 and is_number(words[1])}


def is_number(text: str) -> bool:
    """Return whether a text is a number."""
    try:
        float(text.replace(",", ""))
    except ValueError:
        return False
    return True


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
