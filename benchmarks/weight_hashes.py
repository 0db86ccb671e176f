"""Print hashes of what every recipe computes under several strategies, to compare two versions of the code.

Each training row is a run of a few steps through the command line (CPU, fp32, deterministic), with a hash of the
weights and of their EMA. Further rows cover accumulation, loader processes, a killed and resumed run, the results of
`apply`, `sample` and `evaluate`, the files of a checkpoint, every `--help` page and the public API. A refactoring must
leave every hash unchanged:

    python benchmarks/weight_hashes.py --out before.json          # in the old checkout
    python benchmarks/weight_hashes.py --compare before.json      # in the new checkout

On a GPU, `--gpu` trains each recipe with the step as a CUDA graph and eagerly, compiled and not. Hashes depend on the
processor, the GPU and the torch version, so run both on the same machine.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
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
STRATEGIES = {"single": "1", "ddp": "2", "fsdp": "2", "lightning": "2"}  # number of processes for each strategy
OTHER_FLAGS = {"accumulated": "--accumulate 2", "workers": "--loader workers --workers 2"}
GPU_FLAGS = {
    f"graph {graph}, compile {on}": f"--graph {graph} --compile {on}" for graph in ("on", "off") for on in ("on", "off")
}
COMMANDS = (
    *("", "train", "evaluate", "verify", "compare", "plan", "pack", "doctor", "board", "settings", "new", "sample"),
    *("apply", "predict", "measure", "import", "export", "launch slurm", "launch kubernetes", "launch torchrun"),
)
GENERATORS = ("dcgan", "dual_gan", "r3gan")
EMA_PREFIX = "ema/"
PHOTO = "src/paceline/data/bundled/coffee.webp"
Row = tuple[str, Callable[[Path], str]]  # a name, and a function that computes the hash in an empty folder


def main() -> int:
    """Compute every row and print its hash; return 1 if a hash differs from `--compare`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", default=",".join(RUNS), help="comma-separated recipes")
    parser.add_argument("--strategies", default=",".join(STRATEGIES), help="comma-separated strategies")
    parser.add_argument("--gpu", action="store_true", help="train on one GPU with and without graphs and compilation")
    parser.add_argument("--only", default="", help="compute only rows whose name contains this text")
    parser.add_argument("--keep", type=Path, help="keep the run folders of strategy `single` in this folder")
    parser.add_argument("--out", type=Path, help="write the hashes to this JSON file")
    parser.add_argument("--compare", type=Path, help="exit with 1 unless every hash equals the one in this file")
    options = parser.parse_args()
    before = json.loads(options.compare.read_text()) if options.compare else {}
    hashes: dict[str, str] = {}
    names, strategies = options.runs.split(","), options.strategies.split(",")
    rows = gpu_rows(names) if options.gpu else cpu_rows(names, strategies, options.keep)
    for name, compute in rows:
        if options.only not in name:
            continue
        with tempfile.TemporaryDirectory() as folder:
            hashes[name] = compute(Path(folder))
        verdict = ("  equal" if before.get(name) == hashes[name] else "  DIFFERS") if before else ""
        print(f"{name:<44} {hashes[name]}{verdict}", flush=True)
        if options.out:  # written after every row, so that an interruption loses nothing
            options.out.write_text(json.dumps(hashes, indent=1))
    return int(bool(before) and any(before.get(name) != value for name, value in hashes.items()))


def cpu_rows(names: list[str], strategies: list[str], kept: Path | None) -> Iterator[Row]:
    """Yield a row per recipe and strategy, and the rows that need only one strategy."""
    for name in names:
        for strategy in strategies:
            flags = ["--strategy", strategy, "--devices", STRATEGIES[strategy]]
            yield f"{name} {strategy}×{STRATEGIES[strategy]}", partial(train_and_hash, RUNS[name], flags)
        for label, words in OTHER_FLAGS.items():
            yield f"{name} {label}", partial(train_and_hash, RUNS[name], words.split())
        yield f"{name} results", partial(hash_results, name, kept)
    yield "classification killed and resumed", partial(kill_and_resume, RUNS["classification"])
    for command in COMMANDS:
        yield f"paceline {command} --help", partial(hash_output, [*command.split(), "--help"])
    yield (
        "paceline.__all__",
        lambda folder: shorten(python(folder, "-c", "import paceline; print(sorted(paceline.__all__))").encode()),
    )


def gpu_rows(names: list[str]) -> Iterator[Row]:
    """Yield a row per recipe, with graphs and compilation on and off."""
    for name in names:
        for label, words in GPU_FLAGS.items():
            yield f"{name} GPU, {label}", partial(train_and_hash, RUNS[name], [*words.split(), "--accelerator", "cuda"])


def python(folder: Path, *arguments: str, allowed: int = 0) -> str:
    """Run Python in a folder and return what it prints to stdout; exit if it fails."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "120", "XDG_CACHE_HOME": str(folder / "cache")}
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, cwd=folder, env=environment)
    if done.returncode != allowed:
        raise SystemExit(f"{' '.join(arguments)}\n{done.stdout[-1500:]}\n{done.stderr[-1500:]}")
    return done.stdout


def train(folder: Path, run: str, flags: list[str]) -> Path:
    """Train a run in `folder/run` and return its last checkpoint."""
    command = ["-m", "paceline", "train", *run.split(), "--out", "run", "--seed", "1", "--deterministic"]
    accelerator = [] if "--accelerator" in flags else ["--accelerator", "cpu"]
    python(folder, *command, "--precision", "fp32", *accelerator, *flags)
    return sorted((folder / "run" / "checkpoints").glob("[0-9]*"))[-1]


def train_and_hash(run: str, flags: list[str], folder: Path) -> str:
    """Return the hash of a run's final weights."""
    return hash_weights(train(folder, run, flags) / "weights.safetensors")


def hash_results(name: str, kept: Path | None, folder: Path) -> str:
    """Train a run and hash its checkpoint's file names, the metrics of `evaluate`, and the files of apply or sample."""
    last = train(folder, RUNS[name], [])
    files = sorted(path.name for path in last.iterdir())
    metrics = python(folder, "-m", "paceline", "evaluate", "run", "--accelerator", "cpu")
    numbers = [line for line in metrics.splitlines() if line.strip() and " s" not in line]
    if name in GENERATORS:
        python(folder, "-m", "paceline", "sample", "run", "--out", "sheet.png", "--accelerator", "cpu")
    elif name != "classification":
        photo = str(Path(__file__).resolve().parents[1] / PHOTO)
        python(folder, "-m", "paceline", "apply", "run", photo, "--out", "applied", "--accelerator", "cpu")
    images = [path for path in (folder / "sheet.png", *sorted(folder.glob("applied/*"))) if path.is_file()]
    if kept:
        (folder / "run").rename(kept / name)
    content = "\n".join([*files, *numbers, *(sha256(image.read_bytes()).hexdigest() for image in images)])
    return shorten(content.encode())


def kill_and_resume(run: str, folder: Path) -> str:
    """Kill a run with SIGKILL after its first checkpoint, run the command again, and hash the final weights."""
    command = [sys.executable, "-m", "paceline", "train", *run.split(), "--out", "run", "--seed", "1"]
    command += ["--deterministic", "--precision", "fp32", "--accelerator", "cpu", "--set", "save_every=64 images"]
    running = subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while running.poll() is None and not list(folder.glob("run/checkpoints/[0-9]*")):
        time.sleep(0.01)
    running.send_signal(signal.SIGKILL)
    running.wait()
    return train_and_hash(run, ["--set", "save_every=64 images"], folder)


def hash_output(arguments: list[str], folder: Path) -> str:
    """Return the hash of what a command prints."""
    return shorten(python(folder, "-m", "paceline", *arguments).encode())


def hash_weights(file: Path) -> str:
    """Return short hashes of the networks' tensors and, after a slash, of their EMA; tensors are sorted by name."""
    tensors = safetensors.torch.load_file(file)
    plain, ema = sha256(), sha256()
    for name in sorted(tensors):
        digest = ema if name.startswith(EMA_PREFIX) else plain
        digest.update(name.removeprefix(EMA_PREFIX).encode())
        digest.update(tensors[name].contiguous().numpy().tobytes())
    return f"{plain.hexdigest()[:24]}/{ema.hexdigest()[:8]}"


def shorten(content: bytes) -> str:
    """Return the first digits of a hash."""
    return sha256(content).hexdigest()[:24]


if __name__ == "__main__":
    sys.exit(main())
