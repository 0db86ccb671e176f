r"""Measure the time from a `paceline train` command to the end of its first training step.

    PYTHONPATH=src python benchmarks/start_up.py [--recipes classification,dcgan,dual_gan] [--devices 1] [--json FILE]
    PYTHONPATH=src python benchmarks/start_up.py --recipes classification:cifar100,dcgan:cifar10 -- \
        --data npz --data-root cifar100.npz

A preset other than `quick` is written after the recipe's name and a colon. Arguments after `--` are passed to
`paceline train`. The run ends after its first step but starts like a long one, so that `--compile auto` may compile it.

Each measurement starts a new Python process, as a user would. The end of the first step is the time of the first line
in metrics.jsonl (with `log_every=1 steps`). The recipes take turns with a process that only imports torch, because
importing torch is the largest part and depends on the state of the disk cache. The first round fills the caches and is
left out. Other programs on the machine make all times longer, so run this on an idle machine. The CPU time (user and
system) of the command up to that step, with its child processes, depends less on them.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from paceline.runs.provenance import versions_and_hardware

IMPORT_TORCH = "import torch"


def seconds_to_first_step(recipe: str, words: list[str], folder: Path) -> float:
    """Train a recipe in a new process until its first step ends; return the seconds from the start of the process."""
    out = folder / "run"
    name, _, preset = recipe.partition(":")
    command = [sys.executable, "-m", "paceline", "train", name, "--preset", preset or "quick", "--out", str(out)]
    command += ["--set", "log_every=1 steps", *words]
    started = time.time()
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
        while (ended := time_of_first_step(out / "metrics.jsonl")) is None:
            if process.poll() is not None:
                sys.exit(f"{' '.join(command)} failed:\n{(folder / 'log').read_text()}")
            time.sleep(0.1)
        process.kill()
        process.wait()
    return ended - started


def time_of_first_step(metrics: Path) -> float | None:
    """Return when a run's first step ended, or None before that."""
    lines = metrics.read_text().split("\n")[:-1] if metrics.exists() else []  # the last line may be incomplete
    return next((float(row["time"]) for row in map(json.loads, lines) if "time/step_seconds" in row), None)


def seconds_to_import_torch() -> float:
    """Return how long a new process takes to import torch."""
    started = time.perf_counter()
    subprocess.run([sys.executable, "-c", IMPORT_TORCH], check=True)
    return time.perf_counter() - started


def cpu_seconds() -> float:
    """Return the CPU time of all child processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> None:
    """Measure, print a table and write the results as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipes", default="classification,dcgan,dual_gan", help="RECIPE or RECIPE:PRESET, …")
    parser.add_argument("--devices", default="1")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", default="", help="JSON file for the results")
    parser.add_argument("rest", nargs="*", help="further arguments for `paceline train`, after --")
    arguments = parser.parse_args()
    load = os.getloadavg()[0]  # before the measurement adds to it
    words = ["--devices", arguments.devices, *arguments.rest]
    recipes = arguments.recipes.split(",")
    seconds: dict[str, list[float]] = {name: [] for name in (IMPORT_TORCH, *recipes)}
    cpu: dict[str, list[float]] = {name: [] for name in seconds}
    for number in range(arguments.repeats + 1):
        for name, times in seconds.items():
            with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
                cpu_before = cpu_seconds()
                spent = (
                    seconds_to_import_torch()
                    if name == IMPORT_TORCH
                    else seconds_to_first_step(name, words, Path(folder))
                )
            if number:
                times.append(spent)
                cpu[name].append(cpu_seconds() - cpu_before)
            print(f"round {number}: {name}: {spent:.2f} s{'' if number else ' (left out)'}", flush=True)
        if arguments.json:
            result = {"seconds": seconds, "cpu_seconds": cpu, "load_average": load}
            Path(arguments.json).write_text(json.dumps({**result, "provenance": versions_and_hardware()}, indent=2))
    print(
        f"{'':28}{'median':>8}{'lowest':>8}{'highest':>9}{'CPU':>8}{'lowest':>8}   seconds, n = {arguments.repeats}, "
        f"load average {load:.1f}"
    )
    for name, times in seconds.items():
        spent_cpu = f"{statistics.median(cpu[name]):8.2f}{min(cpu[name]):8.2f}"
        print(f"{name:28}{statistics.median(times):8.2f}{min(times):8.2f}{max(times):9.2f}{spent_cpu}")


if __name__ == "__main__":
    main()
