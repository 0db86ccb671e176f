"""Print hashes of every recipe's final weights under several strategies, to compare two versions of the code.

Each row is a run of a few steps through the command line (CPU, fp32, deterministic), with a hash of the weights and
of their EMA. A refactoring must leave every hash unchanged:

    python benchmarks/weight_hashes.py --out before.json          # in the old checkout
    python benchmarks/weight_hashes.py --compare before.json      # in the new checkout

Hashes depend on the processor and on the torch version, so run both on the same machine.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from hashlib import sha256
from pathlib import Path

import safetensors.torch

RUNS = {
    "classification": "classification --preset quick --batch-size 32 --images 320",
    "dcgan": "dcgan --preset quick --batch-size 32 --images 320",
    "dual_gan": "dual_gan --preset quick --batch-size 32 --images 320",
    "r3gan": "r3gan --preset quick --batch-size 32 --images 320",
    "super_resolution": "super_resolution --preset quick --batch-size 8 --images 80",
    "srgan": "super_resolution --preset quick --batch-size 8 --images 80 --set stage=adversarial --set vgg=random",
    "esrgan": "esrgan --preset quick --batch-size 8 --images 80 --set vgg=random",
    "restoration": "restoration --preset quick --batch-size 8 --images 80",
    "translation": "translation --preset quick --batch-size 4 --images 24",
}
STRATEGIES = {"single": "1", "ddp": "2", "lightning": "2"}  # number of processes for each strategy
EMA_PREFIX = "ema/"


def main() -> int:
    """Train every configuration and print the hash of its weights; return 1 if a hash differs from `--compare`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", default=",".join(RUNS), help="comma-separated rows")
    parser.add_argument("--strategies", default=",".join(STRATEGIES), help="comma-separated strategies")
    parser.add_argument("--out", type=Path, help="write the hashes to this JSON file")
    parser.add_argument("--compare", type=Path, help="exit with 1 unless every hash equals the one in this file")
    options = parser.parse_args()
    before = json.loads(options.compare.read_text()) if options.compare else {}
    hashes: dict[str, str] = {}
    for name in options.runs.split(","):
        for strategy in options.strategies.split(","):
            row = f"{name} {strategy}×{STRATEGIES[strategy]}"
            hashes[row] = train(RUNS[name].split(), strategy)
            verdict = ("  equal" if before.get(row) == hashes[row] else "  DIFFERS") if before else ""
            print(f"{row:<32} {hashes[row]}{verdict}", flush=True)
            if options.out:  # written after every row, so that an interruption loses nothing
                options.out.write_text(json.dumps(hashes, indent=1))
    return int(bool(before) and any(before.get(row) != found for row, found in hashes.items()))


def train(words: list[str], strategy: str) -> str:
    """Train one run in a temporary folder and return the hash of its final weights."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "paceline", "train", *words, "--out", f"{folder}/run", "--seed", "1"]
        command += ["--strategy", strategy, "--devices", STRATEGIES[strategy], "--accelerator", "cpu"]
        command += ["--deterministic", "--precision", "fp32"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environment)
        if done.returncode:
            raise SystemExit(f"{' '.join(command)}\n{done.stdout[-1500:]}\n{done.stderr[-1500:]}")
        *_, last = sorted(Path(folder, "run", "checkpoints").glob("[0-9]*"))
        return hash_weights(last / "weights.safetensors")


def hash_weights(file: Path) -> str:
    """Return short hashes of the networks' tensors and, after a slash, of their EMA; tensors are sorted by name."""
    tensors = safetensors.torch.load_file(file)
    plain, ema = sha256(), sha256()
    for name in sorted(tensors):
        digest = ema if name.startswith(EMA_PREFIX) else plain
        digest.update(name.removeprefix(EMA_PREFIX).encode())
        digest.update(tensors[name].contiguous().numpy().tobytes())
    return f"{plain.hexdigest()[:24]}/{ema.hexdigest()[:8]}"


if __name__ == "__main__":
    sys.exit(main())
