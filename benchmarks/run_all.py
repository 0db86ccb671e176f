"""Run the benchmarks that need one GPU, one after the other, each with a time limit.

Each benchmark writes NAME.json and NAME.log to the folder `--out`. Run the same command again to continue: benchmarks
that have ended successfully are skipped. Those that need data are left out unless it is given: `--cifar100` is the
`.npz` file for `cifar100.py`, and `--baseline` the `src` folder of another checkout for `apply_speed.py`.

    PYTHONPATH=src python benchmarks/run_all.py --out results --cifar100 cifar100.npz
    PYTHONPATH=src python benchmarks/run_all.py --out results --only slide,apply --seconds 500
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from time import perf_counter
from typing import NamedTuple

from fast_table import ROWS

HERE = Path(__file__).parent


class Job(NamedTuple):
    """A benchmark, its arguments and its time limit."""

    name: str
    script: str
    arguments: list[str]
    seconds: int
    cold: bool = False  # whether caches of compiled kernels are emptied first


def jobs(options: argparse.Namespace) -> Iterator[Job]:
    """Yield the benchmarks in order; those that belong together share the caches of compiled kernels."""
    yield Job("slide", "slide_speed.py", [], 150)
    baseline = ["--baseline", options.baseline] if options.baseline else []
    yield Job("apply", "apply_speed.py", [*baseline, "--few", "4", "--precisions", "bf16,tf32,fp32"], 360)
    if options.cifar100:
        words = ["--preset", "accurate", "--data-root", options.cifar100, "--out", f"{options.out}/runs"]
        yield Job("cifar100-cold", "cifar100.py", [*words, "--seeds", "2", "--", "--epochs", "80"], 150, cold=True)
        # A run this short is compiled by default only if kernels from an earlier run are kept.
        filled = [*words[:-1], f"{options.out}/fill", "--seeds", "2", "--", "--epochs", "2", "--compile", "on"]
        yield Job("cifar100-fill", "cifar100.py", filled, 90)
        yield Job("cifar100-warm", "cifar100.py", [*words, "--seeds", "4,42,7", "--", "--epochs", "80"], 240)
    for name, row in ROWS.items():
        yield Job(f"table-{name}", "fast_table.py", ["--rows", name], row.limit + 10)
    yield Job("overhead", "overhead.py", ["--graph", "--compile", "--repeats", "11"], 150)
    yield Job("start-up", "start_up.py", ["--repeats", "5"], 240)
    if options.cifar100:
        recipes = "classification:cifar100,dcgan:cifar10,dual_gan:cifar10,r3gan:cifar10"
        words = ["--data", "npz", "--data-root", options.cifar100]
        yield Job("start-up-cifar", "start_up.py", ["--recipes", recipes, "--repeats", "3", "--", *words], 300)
    yield Job("memory-forecast", "memory_forecast.py", [], 400)


def run(job: Job, out: Path, caches: Path) -> str:
    """Run one benchmark; return how it ended."""
    if job.cold:
        shutil.rmtree(caches, ignore_errors=True)
    command = [sys.executable, str(HERE / job.script), "--json", str(out / f"{job.name}.json"), *job.arguments]
    environment = {**os.environ, "XDG_CACHE_HOME": str(caches), "TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor")}
    environment["PYTHONUNBUFFERED"] = "1"
    with (out / f"{job.name}.log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)
        try:
            code = process.wait(job.seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return f"stopped after {job.seconds} s"
    if code == 0:
        (out / f"{job.name}.done").touch()
    return "done" if code == 0 else f"failed with exit code {code}, see {job.name}.log"


def main() -> None:
    """Run the chosen benchmarks, until the time is over."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for the results")
    parser.add_argument("--only", default="", help="comma-separated beginnings of names (default: all)")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start no benchmark after this time")
    parser.add_argument("--cifar100", default="", help=".npz file for cifar100.py")
    parser.add_argument("--baseline", default="", help="src folder of another checkout, for apply_speed.py")
    parser.add_argument("--list", action="store_true", help="only print the names and time limits")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    began, caches = perf_counter(), Path(tempfile.mkdtemp(prefix="caches"))
    for job in jobs(options):
        if not job.name.startswith(tuple(options.only.split(","))):
            continue
        if options.list:
            print(f"{job.name}: {job.script} {' '.join(job.arguments)} (at most {job.seconds} s)")
        elif not (options.out / f"{job.name}.done").exists() and perf_counter() - began < options.seconds:
            start = perf_counter()
            state = run(job, options.out, caches)
            print(f"{job.name}: {state} ({perf_counter() - start:.0f} s)", flush=True)
    shutil.rmtree(caches, ignore_errors=True)


if __name__ == "__main__":
    main()
