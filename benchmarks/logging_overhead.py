"""Measure how much loggers slow down training: the same recipe with all loggers, and with metrics.jsonl alone.

Both variants run the engine's loop with metrics.jsonl and sample images. One of them also logs to TensorBoard, to
MLflow with a real server on this machine, and to Weights & Biases offline. Blocks of training take turns, so that a
slowdown of the machine affects both variants. A block ends when its entries are delivered, so the figure is an upper
bound of what the loggers cost in a long run. Needs `pip install 'paceline[mlflow,wandb]'`.

    PYTHONPATH=src python benchmarks/logging_overhead.py --json logging.json
    PYTHONPATH=src python benchmarks/logging_overhead.py --batch 8 --log-every 10 --steps 200   # on a CPU
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
from pathlib import Path

import torch
from _variants import Variant, engine_variant, measure_interleaved, print_rows, write_results

START_SECONDS = 120.0  # maximum time for the MLflow server to start


def make_variant(name: str, loggers: str, folder: Path, options: argparse.Namespace) -> Variant:
    """Return the recipe's training with the given loggers."""
    return engine_variant(
        name,
        options.recipe,
        folder,
        delivers=True,
        preset=options.preset,
        batch_size=options.batch,
        log_every=f"{options.log_every} steps",
        sample_every=f"{options.sample_every} steps",
        evaluate_every="100000 epochs",
        loggers=loggers,
    )


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


def main() -> None:
    """Measure, print a table and write the results as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="dcgan")
    parser.add_argument("--preset", default="quick")
    parser.add_argument("--batch", type=int, default=128, help="batch size")
    parser.add_argument("--loggers", default="tensorboard,mlflow,wandb", help="loggers to measure")
    parser.add_argument("--log-every", type=int, default=50, help="steps between log lines")
    parser.add_argument("--sample-every", type=int, default=1000, help="steps between sample images")
    parser.add_argument("--steps", type=int, default=5000, help="steps of a block")
    parser.add_argument("--repeats", type=int, default=9, help="number of blocks per variant")
    parser.add_argument("--json", default="", help="JSON file for the results")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with tempfile.TemporaryDirectory() as folder, mlflow_server(Path(folder)) as address:
        os.environ |= {"MLFLOW_TRACKING_URI": address, "WANDB_MODE": "offline"}
        variants = [
            make_variant("JSONL alone", "", Path(folder), options),
            make_variant(f"JSONL,{options.loggers}", options.loggers, Path(folder), options),
        ]
        for variant in variants:
            variant.length = options.steps
        rows = measure_interleaved(variants, options.batch, 0.0, options.repeats, device)
    print_rows(f"{options.recipe}, batch {options.batch}, {device}", rows)
    write_results(options.json, options, rows=rows)


if __name__ == "__main__":
    main()
