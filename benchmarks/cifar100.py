"""Measure the accuracy and training time of the classification presets on CIFAR-100 across several seeds.

Each run is `paceline train classification` in its own process. The checkpoint that is best on the validation split is
evaluated once on the test split. Run the same command again to resume after an interruption. The JSON file is written
after every run. Arguments after `--` are passed to every run.

    PYTHONPATH=src python benchmarks/cifar100.py --preset reference --seeds 2,4,42 --data-root cifar100.npz
    PYTHONPATH=src python benchmarks/cifar100.py --preset accurate --data-root cifar100.npz -- --devices 2
    PYTHONPATH=src python benchmarks/cifar100.py --preset cifar100 --data-root cifar100.npz -- --compile on
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from statistics import mean, stdev
from time import perf_counter
from typing import Any

from paceline.runs.metrics import read_metrics
from paceline.runs.provenance import versions_and_hardware

METRICS = ("test/top1", "test/top5", "test/loss", "seconds")


def train(preset: str, seed: int, data_root: Path, folder: Path, extra: list[str]) -> dict[str, Any]:
    """Train one run; return its test metrics, its training time and the elapsed time of the process."""
    command = [sys.executable, "-m", "paceline", "train", "classification", "--data", "npz"]
    command += ["--data-root", str(data_root), "--preset", preset, "--seed", str(seed), "--out", str(folder), *extra]
    print("$", " ".join(command), flush=True)
    start = perf_counter()
    ended = subprocess.run(command, check=False)
    if ended.returncode:
        sys.exit(ended.returncode)
    return {"preset": preset, "seed": seed, **test_metrics(folder), "process_seconds": perf_counter() - start}


def test_metrics(folder: Path) -> dict[str, float | None]:
    """Return the metrics from a run's last evaluation on the test split."""
    rows = read_metrics(folder)
    tested = [row for row in rows if row.get("test/top1") is not None]
    if not tested:
        sys.exit(f"{folder}: metrics.jsonl has no test/top1")
    return {name: tested[-1][name] for name in METRICS}


def summarise(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the mean and sample standard deviation of each metric across the seeds, by preset."""
    summaries = []
    for preset in dict.fromkeys(run["preset"] for run in runs):
        of_preset = [run for run in runs if run["preset"] == preset]
        summary: dict[str, Any] = {"preset": preset, "n": len(of_preset)}
        for name in METRICS:
            values = [run[name] for run in of_preset]
            summary[name] = {"mean": mean(values), "std": stdev(values) if len(values) > 1 else None}
        summaries.append(summary)
    return summaries


def with_spread(figure: dict[str, float | None], digits: int) -> str:
    """Format a mean with its standard deviation, if there is more than one value."""
    spread = "" if figure["std"] is None else f" ± {figure['std']:.{digits}f}"
    return f"{figure['mean']:.{digits}f}{spread}"


def main() -> None:
    """Train every preset with every seed, print a table and write the results as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="reference,accurate", help="comma-separated presets of the recipe")
    parser.add_argument("--seeds", default="2,4,42", help="comma-separated seeds")
    parser.add_argument(
        "--data-root", type=Path, required=True, help=".npz file with x_train, y_train, x_test and y_test"
    )
    parser.add_argument("--out", type=Path, default=Path("runs"), help="folder for the runs")
    parser.add_argument("--json", type=Path, help="JSON file for the results")
    parser.add_argument("extra", nargs="*", help="after --: additional flags for every run")
    arguments = parser.parse_args()

    runs: list[dict[str, Any]] = []
    for preset in arguments.preset.split(","):
        for seed in map(int, arguments.seeds.split(",")):
            folder = arguments.out / f"cifar100-{preset}-{seed}"
            runs.append(train(preset, seed, arguments.data_root, folder, arguments.extra))
            if arguments.json:
                content = {"provenance": versions_and_hardware(), "flags": arguments.extra}
                content |= {"summary": summarise(runs), "runs": runs}
                arguments.json.parent.mkdir(parents=True, exist_ok=True)
                arguments.json.write_text(json.dumps(content, indent=1) + "\n")

    print("\n| preset | n | test top-1 % | test top-5 % | test loss | seconds |\n|---|---|---|---|---|---|")
    for summary in summarise(runs):
        figures = [with_spread(summary[name], digits) for name, digits in zip(METRICS, (2, 2, 4, 1), strict=True)]
        print(f"| {summary['preset']} | {summary['n']} | {' | '.join(figures)} |")


if __name__ == "__main__":
    main()
