"""Helpers for benchmarks that train with `paceline train` for a given time and then read the metrics."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import median
from time import monotonic, perf_counter

from paceline.runs.metrics import read_metrics


class Stopped(Exception):
    """The time of this part is over; the run can be resumed."""


def paceline(*words: str, until: float = 0.0) -> tuple[str, float]:
    """Run a command; return its output and its duration, and exit if it fails. At the time `until`, stop it."""
    print("$ paceline", *words, flush=True)
    start = perf_counter()
    process = subprocess.Popen([sys.executable, "-m", "paceline", *words], stdout=subprocess.PIPE, text=True)
    lines, is_stopped = [], False
    assert process.stdout
    for line in process.stdout:
        print(line, end="", flush=True)
        lines.append(line)
        if until and not is_stopped and monotonic() > until:
            is_stopped = True
            process.send_signal(signal.SIGINT)  # like Ctrl-C: saves a checkpoint
    code = process.wait()
    if is_stopped:
        raise Stopped
    if code:
        sys.exit(code)
    return "".join(lines), perf_counter() - start


def sets(assignments: Iterable[str]) -> list[str]:
    """Return settings as command-line arguments."""
    return [word for assignment in assignments for word in ("--set", assignment)]


def split_arguments() -> tuple[list[str], list[str]]:
    """Return the command-line arguments before and after `--`.

    argparse does not support further positional arguments after options.
    """
    end = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    return sys.argv[1:end], sys.argv[end + 1 :]


def summarise(folder: Path, process_seconds: float) -> dict[str, float]:
    """Return the number of images of a run, its training time and its median speed."""
    rows = read_metrics(folder)
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
        return json.loads(path.read_text())
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
