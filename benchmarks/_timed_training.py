"""Helpers for benchmarks that train with `paceline train` for a given time and then read the metrics."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import median
from time import monotonic

from paceline.runs.metrics import read_metrics

GRACE_S = 60  # after this time, a command that does not stop is killed; it resumes from its last checkpoint


class Stopped(Exception):
    """Raised when the time of this part is over; the same command resumes."""


class Deadline:
    """The time at which a benchmark stops. With `minutes=0`, it does not stop."""

    def __init__(self, minutes: float) -> None:
        self.end = monotonic() + 60 * minutes if minutes else float("inf")

    def check(self, needed_s: float = 0.0) -> None:
        """Raise Stopped if the time is over, or if less is left than the next step needs."""
        if self.left() <= needed_s:
            raise Stopped

    def left(self) -> float:
        """Return the time left, in seconds."""
        return self.end - monotonic()


def run_paceline(
    *words: str, deadline: Deadline | None = None, on_line: Callable[[str], None] | None = None, label: str = ""
) -> str:
    """Run a command and return its output. At the deadline, stop it as with Ctrl-C, and raise Stopped.

    Training saves a checkpoint when it is stopped. `on_line` is called with each line of output. `label` precedes each
    printed line, if several commands run at the same time.
    """
    print(f"{label}$ paceline", *words, flush=True)
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
            print(f"{label}{line}", end="", flush=True)
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


def split_arguments() -> tuple[list[str], list[str]]:
    """Return the command-line arguments before and after `--`.

    argparse does not support further positional arguments after options.
    """
    end = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    return sys.argv[1:end], sys.argv[end + 1 :]


def read_numbers(folder: Path) -> list[dict[str, float]]:
    """Return the lines of a run's metrics.jsonl, without values that are not finite."""
    return [{name: value for name, value in row.items() if value is not None} for row in read_metrics(folder)]


def summarise(folder: Path, process_seconds: float) -> dict[str, float]:
    """Return the number of images of a run, its training time and its median speed."""
    rows = read_numbers(folder)
    speeds = [row["time/images_per_second"] for row in rows if "time/images_per_second" in row]
    return {
        "images": max(row["images"] for row in rows),
        "training_seconds": rows[-1]["seconds"],
        "process_seconds": process_seconds,
        "images_per_second": median(speeds[len(speeds) // 4 :]) if speeds else 0.0,  # without the eager first steps
    }


def make_plan(
    out: Path, minutes: float, images: int, share: float, train: Callable[[Path], dict[str, float]]
) -> dict[str, float]:
    """Return how many images fit into the given time; the plan is stored, so that a resumed run uses the same one.

    Args:
        out: The folder for plan.json.
        minutes: The given time.
        images: The number of images, if it is already known; otherwise 0.
        share: The fraction of the time that is left for training.
        train: A function that trains a short trial run in a folder and returns its summary.
    """
    path = out / "plan.json"
    if path.is_file():
        stored: dict[str, float] = json.loads(path.read_text())
        return stored
    speed = 0.0
    if not images:
        trial = out / "trial"
        shutil.rmtree(trial, ignore_errors=True)  # an interrupted trial is repeated from the start
        speed = train(trial)["images_per_second"]
        shutil.rmtree(trial)
        images = int(speed * minutes * 60 * share)
    plan = {"images": images, "trial_images_per_second": speed, "minutes": minutes}
    path.write_text(json.dumps(plan, indent=1) + "\n")
    return plan


def printed_metrics(printed: str) -> dict[str, float]:
    """Return the metrics that `paceline evaluate` printed."""
    found = re.findall(r"^  (\S+) +([-+.,\deinfa]+)%?$", printed, re.MULTILINE)
    return {name: float(value.replace(",", "")) for name, value in found}
