"""Measure what `--profile N` costs: the speed of a run of a few thousand steps with and without it.

Runs of the same length with and without the profiler take turns, in one process and with the same networks. Each run
uses the whole training loop, with data loading and metrics. A profiled run traces N steps after its warm-up, and writes
and summarises the trace. The setup of a run is not timed.

    PYTHONPATH=src python benchmarks/profile_cost.py --json profile_cost.json    # about a minute on one GPU
    PYTHONPATH=src python benchmarks/profile_cost.py --width 4 --batch 8 --steps 100 --profile 5    # on a CPU
"""

from __future__ import annotations

import argparse
import dataclasses
import tempfile
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
from _variants import WARMUP_STEPS, spread, synchronize, write_results
from reference_style import write_small_images

from paceline.commands.configure import configure
from paceline.runs.folder import RunFolder
from paceline.runs.metrics import MetricsWriter
from paceline.runs.terminal import Display
from paceline.training.build import Parts, assemble
from paceline.training.loop import Loop, Outputs

PROFILED, PLAIN = "with --profile", "without"


def steps_per_second(parts: Parts, num_steps: int, profile: int, folder: Path) -> float:
    """Train for a number of steps in a new loop; return its speed."""
    config = parts.config.with_run(profile=profile)
    run = dataclasses.replace(parts, config=config, total_images=num_steps * parts.feed.images_per_step)
    folder.mkdir()
    writer = MetricsWriter(folder, loggers="")
    loop = Loop(run, Outputs(RunFolder(folder), writer, Display(run.total_images, 0, "", enabled=False)))
    run.recipe.train()
    synchronize(run.world.device)
    start = perf_counter()
    for data in run.feed.steps(0, run.total_images):
        loop.advance(data)
    if loop.profiler:
        loop.profiler.finish()
    synchronize(run.world.device)
    seconds = perf_counter() - start
    writer.close()
    return num_steps / seconds


def main() -> None:
    """Measure, print a table and write the results as JSON after every turn."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=128, help="images per step")
    parser.add_argument("--width", type=int, default=64, help="channels of the networks")
    parser.add_argument("--samples", type=int, default=20_000, help="number of images")
    parser.add_argument("--steps", type=int, default=2000, help="steps per run")
    parser.add_argument("--profile", type=int, default=20, help="profiled steps")
    parser.add_argument("--repeats", type=int, default=5, help="runs with and runs without the profiler")
    parser.add_argument("--json", default="", help="JSON file for the results, with versions and hardware")
    options = parser.parse_args()
    rates: dict[str, list[float]] = {PROFILED: [], PLAIN: []}
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_small_images(folder, options.samples)
        settings = {"data": "npz", "data_root": folder / "random.npz", "batch_size": options.batch, "size": 32}
        settings |= {"channels": 3, "flip": "off", "smallest": 2, "ngf": options.width, "ndf": options.width}
        settings |= {"loader": "resident", "compile": "off", "validation": 0, "epochs": 100_000, "generated_images": 0}
        settings |= dict.fromkeys(("sample_every", "evaluate_every", "save_every"), "100000 epochs")
        parts = assemble(configure("dcgan", {}, assignments=[f"{key}={one}" for key, one in settings.items()]))
        steps_per_second(parts, WARMUP_STEPS, 0, folder / "warm-up")  # captures the CUDA graph
        for turn in range(options.repeats):
            for side in rates if turn % 2 == 0 else reversed(rates):
                profile = options.profile if side == PROFILED else 0
                place = folder / f"run-{turn}-{profile}"
                rates[side].append(steps_per_second(parts, options.steps, profile, place))
            rows = [
                {"variant": side, "steps_per_second": float(np.median(one)), **spread(one)}
                for side, one in rates.items()
            ]
            slower = np.divide(rates[PLAIN], rates[PROFILED]) - 1
            cost = {"median": float(np.median(slower)), **spread(slower.tolist())}
            write_results(options.json, options, rows=rows, slowdown=cost)
    print(f"DCGAN, batch {options.batch}, {options.steps} steps, on {parts.world.device.type}")
    for row in rows:
        print(f"  {row['variant']:16} {row['steps_per_second']:8.1f} steps/s ({row['low']:.1f} – {row['high']:.1f})")
    low, high = cost["low"], cost["high"]
    print(f"  --profile {options.profile} costs {cost['median']:.2%} ({low:.2%} – {high:.2%}), n = {options.repeats}")


if __name__ == "__main__":
    main()
