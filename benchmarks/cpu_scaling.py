"""Measure the scaling efficiency of two processes on a CPU, and how long recipes wait for data held in memory.

`scaling` compares the speed of ResNet-18 in one process and in two (ddp over gloo, with one thread per process).
Both measurements alternate in the same two processes; while one process works alone, the other process waits.
`waiting` trains every recipe for a few steps with `--loader resident` and measures how long training waits for data.

    PYTHONPATH=src python benchmarks/cpu_scaling.py --json cpu_scaling.json
    PYTHONPATH=src python benchmarks/cpu_scaling.py --width 8 --batch 32 --steps 20
"""

from __future__ import annotations

import argparse
import os
import tempfile
from contextlib import redirect_stdout
from dataclasses import asdict
from io import StringIO
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # must be set before torch is imported, including in child processes

import numpy as np
from _variants import write_results

from paceline.benchmarking.step_ladder import measure_ladder
from paceline.commands.configure import configure
from paceline.commands.train import train_here
from paceline.contracts.recipe import Recipe
from paceline.contracts.step_ladder import StepLadder
from paceline.core.files import read_json
from paceline.core.registry import load_class, names
from paceline.core.types import SettingValues
from paceline.launch.tasks import Task, run_in_processes
from paceline.runs.metrics import read_metrics


def scaling(options: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """Return a row per measurement, with its throughput as a fraction of twice the throughput of one process."""
    settings: SettingValues = {"strategy": "ddp", "devices": 2, "accelerator": "cpu", "batch_size": str(options.batch)}
    assignments = [f"width={options.width}", "validation=0", "size=32", "channels=3"]
    config = configure("classification", settings, assignments=assignments)
    result = folder / "step_ladder.json"
    code = run_in_processes(Task.of(measure_ladder, str(result)), config)
    if code:
        raise SystemExit(code)
    rungs = StepLadder.from_json(read_json(result)).rungs
    one = next(rung for rung in rungs if rung.name == "one")
    print(f"ResNet-18 of width {options.width}, batch {options.batch}, one thread per process")
    print(f"  {'measurement':40} {'images/s':>9}  {'low':>8} – {'high':>8}   n  fraction of 2 × one process")
    descriptions = {
        "one": "one process",
        "part": "one process with half the batch, × 2",
        "together": "two processes without communication",
        "gradients": "two, gradients averaged",
        "batchnorm": "two, and BatchNorm synchronised",
        "loading": "two processes as in training, with data loading",
    }
    rows = []
    for rung in rungs:
        share = rung.images_per_second / (2 * one.images_per_second)
        spread = f"{rung.low:8,.1f} – {rung.high:8,.1f}"
        name = descriptions.get(rung.name, rung.name)
        print(f"  {name:40} {rung.images_per_second:9,.1f}  {spread} {rung.n:3}  {share:.1%}")
        rows.append(asdict(rung) | {"share_of_twice_one": share})
    return rows


def waiting(recipe: str, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Return the fraction of each log interval spent waiting for data, excluding the first interval."""
    small = load_class("recipe", recipe, Recipe).small
    batch = int(small.get("batch_size", options.batch))
    settings = {
        "loader": "resident",
        "accelerator": "cpu",
        "batch_size": str(batch),
        "images": options.steps * batch,
        "out": str(folder / recipe),
    }
    log_steps = max(1, options.steps // 10)
    never = f"{options.steps * 10} steps"
    assignments = [
        f"log_every={log_steps} steps",
        f"evaluate_every={never}",
        f"save_every={never}",
        f"sample_every={never}",
    ]
    with redirect_stdout(StringIO()):
        train_here(configure(recipe, settings, assignments=assignments, small=True))
    lines = read_metrics(folder / recipe)
    shares = [share for line in lines if (share := line.get("time/data_wait")) is not None][1:]
    return {"recipe": recipe, "data_wait": float(np.median(shares)), "high": max(shares), "n": len(shares)}


def main() -> None:
    """Run both measurements, print tables and write the results as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=64, help="channels of ResNet-18's first stage")
    parser.add_argument("--batch", type=int, default=64, help="images per step over both processes")
    parser.add_argument("--steps", type=int, default=40, help="steps of each recipe")
    parser.add_argument("--recipes", default=",".join(names("recipe")), help="comma-separated recipes; - for none")
    parser.add_argument("--no-scaling", action="store_true", help="measure only the time spent waiting for data")
    parser.add_argument("--json", default="", help="JSON file for the results, with versions and hardware")
    options = parser.parse_args()
    rungs: list[dict[str, Any]] = []
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        if not options.no_scaling:
            rungs = scaling(options, Path(folder))
        for recipe in filter(None, options.recipes.strip("-").split(",")):
            rows.append(waiting(recipe, options, Path(folder)))
    if rows:
        print(f"time spent waiting for data (loader resident, {options.steps} steps of each recipe at its small size)")
        print(f"  {'recipe':20} {'median':>8} {'highest':>8}   n")
    for row in rows:
        print(f"  {row['recipe']:20} {row['data_wait']:8.2%} {row['high']:8.2%} {row['n']:3}")
    write_results(options.json, options, scaling=rungs, waiting=rows)


if __name__ == "__main__":
    main()
