"""Measure how much loggers slow down training: the same recipe with all loggers, and with metrics.jsonl alone.

Both variants run the engine's loop with metrics.jsonl and sample images. One of them also logs to TensorBoard, to
MLflow with a real server on this machine, and to Weights & Biases offline. Blocks of training take turns, so that a
slowdown of the machine affects both variants. Entries that are still queued when a block ends are delivered before the
next block starts. The time of that delivery is left out of the first ratio (`training`) and included in the second
(`training and delivery`), so the true cost lies between the two ratios. Needs `pip install 'paceline[mlflow,wandb]'`.

    PYTHONPATH=src python benchmarks/logging_overhead.py --json logging.json
    PYTHONPATH=src python benchmarks/logging_overhead.py --batch 8 --log-every 10   # on a CPU
"""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter

import numpy as np
import torch
from _variants import WARMUP_STEPS, spread, synchronize, write_results

from paceline.commands.configure import configure
from paceline.runs.folder import RunFolder
from paceline.runs.metrics import MetricsWriter
from paceline.runs.terminal import Display
from paceline.training.build import Parts, assemble
from paceline.training.loop import Loop, Outputs

START_SECONDS = 120.0  # maximum time for the MLflow server to start


@dataclass
class Side:
    """One variant: a loop with a writer, and the rates of its blocks."""

    name: str
    parts: Parts
    loop: Loop
    writer: MetricsWriter
    training: list[float] = field(default_factory=list)  # images per second
    training_and_delivery: list[float] = field(default_factory=list)

    def run_block(self, seconds: float, device: torch.device) -> None:
        """Train for about this many seconds, then deliver what the loggers have queued."""
        began, images = perf_counter(), self.loop.images
        while perf_counter() - began < seconds:
            self.loop.advance(next(self.steps))
        synchronize(device)
        trained = perf_counter()
        self.writer.flush()
        delivered = perf_counter()
        images = self.loop.images - images
        self.training.append(images / (trained - began))
        self.training_and_delivery.append(images / (delivered - began))

    def __post_init__(self) -> None:
        self.steps = self.parts.feed.steps(0, self.parts.total_images)
        self.parts.recipe.train()


def make_side(name: str, folder: Path, arguments: argparse.Namespace, loggers: str) -> Side:
    """Return a variant of the recipe with the given loggers."""
    settings = {
        "batch_size": arguments.batch,
        "epochs": 100_000,
        "log_every": f"{arguments.log_every} steps",
        "sample_every": f"{arguments.sample_every} steps",
        "save_every": "100000 epochs",
        "evaluate_every": "100000 epochs",
        "loggers": loggers,
    }
    assignments = [f"{key}={value}" for key, value in settings.items()]
    parts = assemble(configure(arguments.recipe, {"preset": arguments.preset}, assignments=assignments))
    writer = MetricsWriter(folder / name, loggers=loggers)
    outputs = Outputs(RunFolder(folder / name), writer, Display(parts.total_images, 0, name, enabled=False))
    return Side(name, parts, Loop(parts, outputs), writer)


@contextmanager
def mlflow_server(folder: Path) -> Iterator[str]:
    """Run an MLflow server with a SQLite database and yield its address."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    command += [
        "--backend-store-uri",
        f"sqlite:///{folder}/server.db",
        "--artifacts-destination",
        f"{folder}/artifacts",
    ]
    with (folder / "server.txt").open("wb") as log:
        lean = {**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}  # without it, many processes start
        server = subprocess.Popen(command, cwd=folder, stdout=log, stderr=log, env=lean)
    try:
        address = f"http://127.0.0.1:{port}"
        until = time.monotonic() + START_SECONDS
        while not _answers(f"{address}/health"):
            if time.monotonic() > until or server.poll() is not None:
                sys.exit(f"the MLflow server did not start:\n{(folder / 'server.txt').read_text()}")
            time.sleep(0.2)
        yield address
    finally:
        server.terminate()
        server.wait()


def _answers(address: str) -> bool:
    try:
        with urllib.request.urlopen(address, timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def compare(sides: list[Side]) -> dict[str, list[float]]:
    """Return the minimum, quartiles and maximum of the slowdown in percent: a block relative to its neighbour."""
    without, logged = sides
    found = {}
    for kind in ("training", "training_and_delivery"):
        ratios = np.array(without.training) / np.array(getattr(logged, kind))
        found[kind] = [float(100 * (ratio - 1)) for ratio in np.percentile(ratios, [0, 25, 50, 75, 100])]
    return found


def main() -> None:
    """Measure, print a table and write the results as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="dcgan")
    parser.add_argument("--preset", default="quick")
    parser.add_argument("--batch", default="128", help="batch size")
    parser.add_argument("--loggers", default="tensorboard,mlflow,wandb", help="loggers to measure")
    parser.add_argument("--log-every", type=int, default=50, help="steps between log lines")
    parser.add_argument("--sample-every", type=int, default=1000, help="steps between sample images")
    parser.add_argument("--seconds", type=float, default=10.0, help="duration of a block")
    parser.add_argument("--repeats", type=int, default=9, help="number of blocks per variant")
    parser.add_argument("--json", default="", help="JSON file for the results")
    arguments = parser.parse_args()
    if arguments.repeats < 5:
        parser.error(f"--repeats {arguments.repeats}: use at least 5 blocks, because single blocks vary")

    load = os.getloadavg()[0]  # before the measurement adds to it
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with tempfile.TemporaryDirectory() as folder, mlflow_server(Path(folder)) as address:
        os.environ |= {"MLFLOW_TRACKING_URI": address, "WANDB_MODE": "offline"}
        sides = [
            make_side("jsonl", Path(folder), arguments, ""),
            make_side("all", Path(folder), arguments, arguments.loggers),
        ]
        for side in sides:
            for _ in range(WARMUP_STEPS):
                side.loop.advance(next(side.steps))
            side.run_block(arguments.seconds, device)
            side.training.clear()
            side.training_and_delivery.clear()
        for repeat in range(arguments.repeats):
            for side in sides if repeat % 2 == 0 else reversed(sides):
                side.run_block(arguments.seconds, device)
        for side in sides:
            side.writer.close()
        lines = sum(1 for _ in (Path(folder) / "all" / "metrics.jsonl").open())
    if lines < arguments.repeats:
        sys.exit(
            f"only {lines} lines were logged in {arguments.repeats} blocks: use more --seconds or a smaller --batch"
        )
    rows = [
        {"variant": side.name, "images_per_second": float(np.median(side.training)), **spread(side.training)}
        for side in sides
    ]
    print(f"{arguments.recipe}, batch {arguments.batch}, {device}, load average {load:.1f} on {os.cpu_count()} cores")
    for row, sinks in zip(rows, ("JSONL alone", f"JSONL,{arguments.loggers}"), strict=True):
        spread_text = f"{row['low']:,.1f} – {row['high']:,.1f}"
        print(f"{sinks:32} {row['images_per_second']:10,.1f} images/s  ({spread_text}, n {row['n']})")
    slowdown = compare(sides)
    for kind, (least, low, middle, high, most) in slowdown.items():
        print(
            f"slowdown, {kind.replace('_', ' '):22} median {middle:+.2f} %, quartiles {low:+.2f} to {high:+.2f}, "
            f"all {least:+.2f} to {most:+.2f}, n {arguments.repeats}"
        )
    print(f"{lines:,} lines logged to {arguments.loggers}")
    write_results(arguments.json, arguments, rows=rows, slowdown_percent=slowdown, lines=lines)


if __name__ == "__main__":
    main()
