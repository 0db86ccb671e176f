"""Measure how fast `paceline apply` upscales a folder of photographs, compared with an older version and a plain loop.

The script creates the images: crops of the bundled photographs, resized to 1020×678 pixels, with noise so that they
compress like photographs. Network: SRResNet ×4 with random weights. PNG files are read and PNG files are written.

- `paceline`: `paceline apply` of this tree, as one command, in fp32 and in the precisions of `--precisions`.
- `baseline`: the command of another checkout, given by the path of its `src` folder.
- `plain`: one image after the other with Pillow, in fp16 (autocast), in tiles of 256 pixels with an overlap of 16.

Each variant runs in a new process, which first applies the network to a few images. The time for the folder is measured
in the process, so it includes neither imports nor the start of CUDA. The variants take turns. GPU utilisation is
sampled with NVML while the folder is processed. Results are written after each turn.

    PYTHONPATH=src python benchmarks/apply_speed.py --json apply_speed.json --baseline ../old/src
    PYTHONPATH=src python benchmarks/apply_speed.py --images 4 --size 255x170 --turns 1 --device cpu   # on a CPU
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

SCALE, TILE_PX, OVERLAP_PX = 4, 256, 16
PLAIN, BASELINE = "plain fp16", "baseline"


class BusyShare(threading.Thread):
    """Samples the GPU's utilisation every 20 ms until it is stopped."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.samples: list[int] = []
        self._ended = threading.Event()
        self.start()

    def run(self) -> None:
        try:
            import pynvml

            pynvml.nvmlInit()
            gpu = pynvml.nvmlDeviceGetHandleByIndex(0)
            while not self._ended.wait(0.02):
                self.samples.append(pynvml.nvmlDeviceGetUtilizationRates(gpu).gpu)
        except Exception:  # no GPU
            return

    def stop(self) -> float | None:
        self._ended.set()
        self.join()
        return statistics.mean(self.samples) / 100 if self.samples else None


def make_images(folder: Path, count: int, size: tuple[int, int]) -> None:
    from paceline.data.bundled import FOLDER
    from paceline.images.decode import decode

    photos = [decode(path).convert("RGB") for path in sorted(FOLDER.glob("*.webp"))]
    folder.mkdir(parents=True, exist_ok=True)

    def make(number: int) -> None:
        pixels = np.asarray(photos[number % len(photos)].resize(size, Image.Resampling.BICUBIC)).astype(np.int16)
        noisy = pixels + np.random.default_rng(number).normal(0, 3, pixels.shape)
        Image.fromarray(np.clip(noisy, 0, 255).astype(np.uint8)).save(folder / f"{number:03}.png")

    with ThreadPoolExecutor() as threads:
        list(threads.map(make, range(count)))


def make_weights(path: Path) -> None:
    from paceline.commands.configure import configure
    from paceline.contracts.recipe import DataSpec
    from paceline.inference.trained import build
    from paceline.runs.weights import write_weights

    config = configure("super_resolution", {}, assignments=[f"scale={SCALE}"], elsewhere=True)
    spec = DataSpec(3, 96, 96)
    write_weights(path, config, spec, build(config, spec).state_dict())


def run_paceline(weights: str, images: str, out: str, device: str, precision: str) -> None:
    from paceline.cli.app import run

    words = ["apply", weights, images, "--out", out, "--accelerator", device, "--overwrite"]
    if run(words + (["--precision", precision] if precision else [])):
        raise SystemExit("apply failed")


def run_plain(weights: str, images: str, out: str, device: str) -> None:
    """Apply the network like a plain script: one image and one tile at a time."""
    import torch

    from paceline.inference.trained import open_image_model

    network = open_image_model(weights).recipe.to(device)
    Path(out).mkdir(parents=True, exist_ok=True)
    for path in sorted(Path(images).glob("*.png")):
        pixels = np.asarray(Image.open(path).convert("RGB"))
        image = torch.from_numpy(pixels.astype(np.float32)).permute(2, 0, 1)[None] / 127.5 - 1
        height, width = image.shape[-2:]
        made = torch.empty(1, 3, height * SCALE, width * SCALE)
        for top in range(0, height, TILE_PX):
            for left in range(0, width, TILE_PX):
                first_row, first_column = max(0, top - OVERLAP_PX), max(0, left - OVERLAP_PX)
                last_row, last_column = min(height, top + TILE_PX), min(width, left + TILE_PX)
                tile = image[..., first_row : last_row + OVERLAP_PX, first_column : last_column + OVERLAP_PX]
                with torch.no_grad(), torch.autocast(device, torch.float16, enabled=device == "cuda"):
                    result = network.image_to_image(tile.to(device))["image"].float().cpu()
                rows, columns = (top - first_row) * SCALE, (left - first_column) * SCALE
                inner = result[
                    ..., rows : rows + (last_row - top) * SCALE, columns : columns + (last_column - left) * SCALE
                ]
                made[..., top * SCALE : last_row * SCALE, left * SCALE : last_column * SCALE] = inner
        levels = ((made[0].clamp(-1, 1) + 1) * 127.5).round().byte().permute(1, 2, 0).numpy()
        Image.fromarray(levels).save(Path(out) / path.name)


def measure_here(arguments: argparse.Namespace) -> None:
    """Apply the network to a few images, then to the folder; print the seconds, CPU time and GPU's busy share."""
    side, folder = arguments.side, Path(arguments.work)
    # Each version writes its own file, since settings differ between versions.
    weights = folder / ("baseline.safetensors" if side == BASELINE else "weights.safetensors")
    if not weights.exists():
        make_weights(weights)

    def work(images: str, out: str) -> None:
        if side == PLAIN:
            run_plain(str(weights), images, out, arguments.device)
        else:
            run_paceline(str(weights), images, out, arguments.device, "" if side == BASELINE else side)

    work(str(folder / "warmup"), str(folder / "warm"))
    busy, start, cpu = BusyShare(), time.perf_counter(), cpu_seconds()
    work(str(folder / arguments.folder), str(folder / "out"))
    seconds, cpu = time.perf_counter() - start, cpu_seconds() - cpu
    print("MEASURED " + json.dumps({"seconds": seconds, "cpu_seconds": cpu, "gpu_busy": busy.stop()}))


def cpu_seconds() -> float:
    """Return the CPU time of this process and of its child processes that have ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--images", type=int, default=64)
    parser.add_argument("--size", default="1020x678")
    parser.add_argument("--few", type=int, default=0, help="images for the plain loop and the baseline; default: all")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--precisions", default="fp32,bf16")
    parser.add_argument("--baseline", default="", help="the src folder of another checkout")
    parser.add_argument("--json", default="")
    parser.add_argument("--side", default="", help=argparse.SUPPRESS)
    parser.add_argument("--work", default="", help=argparse.SUPPRESS)
    parser.add_argument("--folder", default="images", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.side:
        measure_here(arguments)
        return
    work = Path(tempfile.mkdtemp(prefix="apply_speed"))
    width, height = map(int, arguments.size.split("x"))
    make_images(work / "images", arguments.images, (width, height))
    make_images(work / "warmup", 2, (width, height))
    make_images(work / "few", few := arguments.few or arguments.images, (width, height))
    own = os.environ.get("PYTHONPATH", "src")
    sides = {precision: own for precision in arguments.precisions.split(",")} | {PLAIN: own}
    sides |= {BASELINE: arguments.baseline} if arguments.baseline else {}
    found: dict[str, list[dict[str, Any]]] = {side: [] for side in sides}
    for turn in range(arguments.turns):
        for side, source in sides.items():
            shutil.rmtree(work / "out", ignore_errors=True)
            folder, count = ("few", few) if side in (PLAIN, BASELINE) else ("images", arguments.images)
            words = ["--side", side, "--work", str(work), "--device", arguments.device, "--folder", folder]
            done = subprocess.run(
                [sys.executable, __file__, *words],
                env={**os.environ, "PYTHONPATH": str(Path(source).resolve())},
                capture_output=True,
                text=True,
            )
            lines = [line for line in done.stdout.splitlines() if line.startswith("MEASURED ")]
            if not lines:
                print(f"{side}: {done.stderr[-2000:]}", flush=True)  # the other variants are still measured
                continue
            found[side].append({"images": count, **json.loads(lines[0].removeprefix("MEASURED "))})
            per_image = [one["seconds"] / count for one in found[side]]
            shares = [one["gpu_busy"] for one in found[side] if one["gpu_busy"] is not None]
            cpu = f", CPU {statistics.median(one['cpu_seconds'] / count for one in found[side]):.2f} s per image"
            busy = f", GPU busy {statistics.median(shares):.0%}" if shares else ""
            spread = f"{min(per_image):.3f}–{max(per_image):.3f}"
            median = f"{statistics.median(per_image):.3f} s per image ({spread}, n = {len(per_image)})"
            print(f"turn {turn + 1}: {side}: {median}{cpu}{busy}", flush=True)
            if arguments.json:
                content = {"size": arguments.size, "sides": found}
                Path(arguments.json).write_text(json.dumps(content, indent=1))
    shutil.rmtree(work)


if __name__ == "__main__":
    main()
