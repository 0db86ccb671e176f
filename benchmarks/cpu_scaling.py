"""How well two processes share a CPU, and how long recipes wait for data that lies in memory.

`scaling`: ResNet-18 under ddp in two processes (gloo), each with one thread, against one process with one thread.
Both are measured in the same two processes, in turns, and while one works alone the other waits.
`waiting`: every recipe for some steps with `--loader resident`; the share of the time in which it waited for data.

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

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported, here and in the processes that are started

import numpy as np
from _sides import keep_json

from paceline.benchmarking.step_ladder import measure_ladder
from paceline.commands.configure import configure
from paceline.commands.train import train_here
from paceline.contracts.recipe import Recipe
from paceline.contracts.step_ladder import StepLadder
from paceline.core.files import read_json
from paceline.core.registry import load_class, names
from paceline.launch.tasks import Task, run_in_processes
from paceline.runs.metrics import read_metrics


def scaling(options: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """The rates of one process and of two, and how much of twice the one the two reach."""
    settings = {"strategy": "ddp", "devices": 2, "accelerator": "cpu", "batch_size": str(options.batch)}
    assignments = [f"width={options.width}", "validation=0", "size=32", "channels=3"]
    config = configure("classification", settings, assignments=assignments)
    result = folder / "ceilings.json"
    code = run_in_processes(Task.of(measure_ladder, str(result)), config)
    if code:
        raise SystemExit(code)
    rungs = StepLadder.from_json(read_json(result)).rungs
    one = next(rung for rung in rungs if rung.name == "one")
    print(f"ResNet-18 of width {options.width}, batch {options.batch}, one thread a process")
    print(f"  {'what':40} {'images/s':>9}  {'low':>8} – {'high':>8}   n  of twice one process")
    words = {
        "one": "one process",
        "part": "one process on its part, times two",
        "together": "two processes that share nothing",
        "gradients": "two with gradients shared",
        "batchnorm": "two with BatchNorm shared, too",
        "loading": "two as in training, data included",
    }
    rows = []
    for rung in rungs:
        of_twice_one = rung.images_per_second / (2 * one.images_per_second)
        spread = f"{rung.low:8,.1f} – {rung.high:8,.1f}"
        name = words.get(rung.name, rung.name)
        print(f"  {name:40} {rung.images_per_second:9,.1f}  {spread} {rung.n:3}  {of_twice_one:.1%}")
        rows.append(asdict(rung) | {"of_twice_one": of_twice_one})
    return rows


def waiting(recipe: str, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """The share of the time between two logs in which the loop waited for data; the first is left out."""
    small = load_class("recipe", recipe, Recipe).small
    batch = int(small.get("batch_size", options.batch))
    settings = {
        "loader": "resident",
        "accelerator": "cpu",
        "batch_size": str(batch),
        "images": options.steps * batch,
        "out": str(folder / recipe),
    }
    often = max(1, options.steps // 10)
    rare = f"{options.steps * 10} steps"
    assignments = [f"log_every={often} steps", f"evaluate_every={rare}", f"save_every={rare}", f"sample_every={rare}"]
    with redirect_stdout(StringIO()):
        train_here(configure(recipe, settings, assignments=assignments, small=True))
    lines = read_metrics(folder / recipe)
    shares = [line["time/data_wait"] for line in lines if "time/data_wait" in line][1:]
    return {"recipe": recipe, "data_wait": float(np.median(shares)), "high": max(shares), "n": len(shares)}


def main() -> None:
    """Measures both, prints tables and writes JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=64, help="channels of ResNet-18's first stage")
    parser.add_argument("--batch", type=int, default=64, help="images per step over both processes")
    parser.add_argument("--steps", type=int, default=40, help="of each recipe")
    parser.add_argument("--recipes", default=",".join(names("recipe")), help="with commas; - for none")
    parser.add_argument("--no-scaling", action="store_true", help="only the waiting")
    parser.add_argument("--json", default="", help="file for the numbers, with versions and hardware")
    options = parser.parse_args()
    rungs: list[dict[str, Any]] = []
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        if not options.no_scaling:
            rungs = scaling(options, Path(folder))
        for recipe in filter(None, options.recipes.strip("-").split(",")):
            rows.append(waiting(recipe, options, Path(folder)))
    if rows:
        print(f"waiting for data, loader resident, {options.steps} steps of each recipe in its small form")
        print(f"  {'recipe':20} {'median':>8} {'highest':>8}   n")
    for row in rows:
        print(f"  {row['recipe']:20} {row['data_wait']:8.2%} {row['high']:8.2%} {row['n']:3}")
    keep_json(options.json, options, scaling=rungs, waiting=rows)


if __name__ == "__main__":
    main()
