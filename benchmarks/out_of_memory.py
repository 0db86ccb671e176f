"""Start runs that do not fit on a GPU; check that the message names the phase and a setting that fits.

Another process first takes all memory of the GPU except for `--left` GiB, so that the runs fail quickly. Each run is a
process of its own, forked from one that has imported the package. It must end with exit code 2 and one line that
contains the phase and `--accumulate N`. With `--retry`, the same command with this setting must then train a step. The
JSON file is written after every run.

    PYTHONPATH=src python benchmarks/out_of_memory.py --retry --json out_of_memory.json
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import re
import sys
import tempfile
from multiprocessing.connection import Connection
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import torch

import paceline.cli.app
import paceline.commands.train  # imported before the processes are forked
from paceline.runs.provenance import versions_and_hardware

GIB = 2**30
PHASE = re.compile(r"out of memory in phase '([^']+)'.* needs about ([\d.,]+) of ([\d.,]+) GiB")
ACCUMULATE = re.compile(r"--accumulate (\d+)")


class Case(NamedTuple):
    """A command, and a batch size with which it does not fit."""

    words: str
    batch: int


CASES = {
    "ResNet-18": Case("classification --preset quick --set depth=18 --set width=64", 200_000),
    "dcgan": Case("dcgan --preset quick --set ngf=64 --set ndf=64", 131_072),
    "dual_gan": Case("dual_gan --preset quick --set ngf=64 --set ndf=64", 131_072),
    "r3gan": Case("r3gan --preset quick --set width=128", 32_768),
    "super_resolution": Case("super_resolution --crop 128 --set scale=4", 2048),
    "restoration": Case("restoration --crop 128", 2048),
    "translation": Case("translation --preset quick --set ngf=64", 2048),
}


def train(command: list[str], log: Path) -> None:
    """Run a command in this process, with its output in a file, and exit with its code."""
    with log.open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    code = paceline.cli.app.run(command)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def run(words: str, batch: int, more: list[str], folder: Path) -> tuple[int | None, str, float]:
    """Train one step in a process of its own; return its exit code, its last line and the seconds that it took."""
    command = ["train", *words.split(), "--batch-size", str(batch), "--images", str(batch), "--out", str(folder)]
    command += ["--accelerator", "cuda", "--compile", "off", *more]
    log, start = folder.with_suffix(".log"), perf_counter()
    process = multiprocessing.get_context("fork").Process(target=train, args=(command, log))
    process.start()
    process.join()
    return process.exitcode, (log.read_text().strip().splitlines() or [""])[-1], perf_counter() - start


def hold_memory(left: float, connection: Connection) -> None:
    """Take the GPU's memory except for `left` GiB; send versions and hardware; wait for the end of the benchmark."""
    free, _ = torch.cuda.mem_get_info()
    held = torch.empty(int(max(0, free - left * GIB)), dtype=torch.uint8, device="cuda")
    connection.send({"provenance": versions_and_hardware(), "held_bytes": held.numel()})
    connection.recv()


def main() -> None:
    """Run the cases in turn until all are done."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--left", type=float, default=16, help="GiB that the runs may use")
    parser.add_argument("--cases", default=",".join(CASES), help="comma-separated cases")
    parser.add_argument("--count", type=int, default=10, help="number of runs")
    parser.add_argument("--retry", action="store_true", help="also run the first suggestion of each case")
    parser.add_argument("--json", default="", help="JSON file for the results, with versions and hardware")
    options = parser.parse_args()
    here, there = multiprocessing.Pipe()  # this process must not start CUDA, since it is forked
    holder = multiprocessing.get_context("spawn").Process(target=hold_memory, args=(options.left, there), daemon=True)
    holder.start()
    there.close()
    machine = here.recv()
    names, results = options.cases.split(","), []
    with tempfile.TemporaryDirectory() as folder:
        for number in range(options.count):
            name = names[number % len(names)]
            words, batch = CASES[name].words, CASES[name].batch * (1 + number // len(names))
            out = Path(folder) / f"{number}"
            code, line, seconds = run(words, batch, [], out)
            phase, setting = PHASE.search(line), ACCUMULATE.search(line)
            row: dict[str, Any] = {"case": name, "batch": batch, "code": code, "line": line, "seconds": seconds}
            row["named"] = code == 2 and phase is not None and setting is not None
            if options.retry and setting and number < len(names):
                again, line, _ = run(words, batch, ["--accumulate", setting[1]], out)
                row |= {"accumulate": int(setting[1]), "fits": again == 0, "retry_line": line}
            results.append(row)
            print(f"{name}, batch {batch}: {row['line']}", flush=True)
            print(f"    named: {row['named']}, fits with the suggestion: {row.get('fits')}", flush=True)
            if options.json:
                Path(options.json).write_text(json.dumps({**machine, "runs": results}, indent=1) + "\n")
    here.send(None)
    print(f"{sum(row['named'] for row in results)} of {len(results)} named")


if __name__ == "__main__":
    main()
