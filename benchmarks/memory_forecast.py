"""Compare the forecast of `paceline plan --memory` with the peak memory of eager training steps.

Each row is one recipe at a size that needs more than 4 GiB. The forecast is computed in processes of its own, which do
not use the GPU. The measurement trains some steps in another process. On a GPU, `allocated` is
torch.cuda.max_memory_allocated after the first step, in which cuDNN also tries slower algorithms, and `first step` is
the peak of that step. `tensors` is the peak of the memory of all tensors in a step, without cuDNN's workspaces and
other memory that operations use internally. On a CPU, only `tensors` is measured.

    PYTHONPATH=src python benchmarks/memory_forecast.py --json memory_forecast.json
    PYTHONPATH=src python benchmarks/memory_forecast.py --accelerator cpu --small
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from _variants import write_random_rows, write_results

from paceline.commands.configure import configure
from paceline.config.resolve import Config
from paceline.data.source import open_sources
from paceline.training.build import assemble
from paceline.training.memory import StorageLog, kept_data_bytes, precision_of, trace_step

GIBIBYTE = 2**30
STEPS = 3  # after the first one
PHOTOS = "data_root={photos}"
ADVERSARIAL = ["stage=adversarial", "vgg={vgg}"]
# By name: the recipe, its settings, the batch size, and a batch size for a CPU.
ROWS: dict[str, tuple[str, list[str], int, int]] = {
    "classification, ResNet-18, 32²": ("classification", ["data=digits", "size=32"], 2048, 16),
    "classification, ResNet-50, 64²": ("classification", ["data=digits", "size=64", "depth=50"], 256, 4),
    "classification, ResNet-50, 64², recomputed": (
        "classification",
        ["data=digits", "size=64", "depth=50", "checkpoint_activations=on"],
        512,
        4,
    ),
    "dcgan, 64²": ("dcgan", ["data=digits", "size=64"], 6144, 16),
    "dcgan, 64², R1": ("dcgan", ["data=digits", "size=64", "r1=1", "d_norm=none"], 4096, 16),
    "dual_gan, 64²": ("dual_gan", ["data=digits", "size=64"], 4096, 16),
    "r3gan, 32²": ("r3gan", ["data=digits", "size=32"], 512, 2),
    "super_resolution": ("super_resolution", ["crop=96", PHOTOS], 512, 2),
    "super_resolution, adversarial": ("super_resolution", ["crop=96", PHOTOS, *ADVERSARIAL], 192, 2),
    "esrgan, adversarial": ("esrgan", ["preset=esrgan", "crop=128", PHOTOS, "vgg={vgg}"], 32, 1),
    "restoration": ("restoration", ["crop=128", PHOTOS], 256, 2),
    "translation, pix2pix": ("translation", ["preset=pix2pix", "crop=256", "data_root={pairs}"], 96, 1),
    "translation, deepliif": ("translation", ["preset=deepliif", "crop=512", "data_root={rows}"], 2, 1),
}


def configured(name: str, options: argparse.Namespace) -> Config:
    """Return the settings of a row."""
    recipe, settings, batch, small = ROWS[name]
    files = {name: f"{options.folder}/{name}" for name in ("photos", "pairs", "rows")}
    files["vgg"] = f"{options.folder}/vgg19.safetensors"
    given = [setting.format(**files) for setting in settings]
    given += [f"batch_size={small if options.small else batch}", "graph=off", f"accelerator={options.accelerator}"]
    given += ["images=1000000", "validation=0", "strategy=single"]
    return configure(recipe, {}, assignments=given, elsewhere=True)


def forecast_row(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Return the forecast in GiB by kind of memory. Call it in a new process."""
    config = configured(name, options)
    precision, sources = precision_of(config), open_sources(config)
    samples = -(-int(config.run.batch_size) // config.run.accumulate)
    recompute = config.run.checkpoint_activations == "on"
    traced = trace_step(config, sources, precision, samples, recompute=recompute)
    (phase, _), sizes = max(traced.peaks.items(), key=lambda item: sum(item[1].values()))
    parts: dict[str, float] = {}
    for column, size in sizes.items():
        parts[column.kind] = parts.get(column.kind, 0.0) + size / GIBIBYTE
    parts["data"] = kept_data_bytes(config, sources, 0) / GIBIBYTE
    return {"forecast": parts, "forecast_gib": sum(parts.values()), "phase": phase}


def measure_row(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Return the measured memory in GiB. Call it in a new process."""
    parts = assemble(configured(name, options))
    device, recipe = parts.world.device, parts.recipe
    cuda = device.type == "cuda"
    recipe.train()
    data = next(parts.feed.steps(0, parts.feed.images_per_step))
    result = {"before_gib": torch.cuda.memory_allocated(device) / GIBIBYTE} if cuda else {}
    parts.step(data)
    if cuda:
        result["first_step_gib"] = torch.cuda.max_memory_allocated(device) / GIBIBYTE
        torch.cuda.reset_peak_memory_stats(device)
        for _ in range(STEPS):
            parts.step(data)
        result["allocated_gib"] = torch.cuda.max_memory_allocated(device) / GIBIBYTE
        result["after_gib"] = torch.cuda.memory_allocated(device) / GIBIBYTE
        result["reserved_gib"] = torch.cuda.max_memory_reserved(device) / GIBIBYTE
    log = StorageLog(device)
    with log:
        parts.step(data)
    result["tensors_gib"] = max(sum(sizes.values()) for sizes in log.peaks.values()) / GIBIBYTE
    return result


def start(kind: str, name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Run one part of a row in a new process and return its result; on an error, the last line of its output."""
    command = [sys.executable, __file__, "--part", kind, "--row", name, "--folder", options.folder]
    command += ["--accelerator", options.accelerator, *(["--small"] if options.small else [])]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        return {f"{kind}_error": (done.stderr.strip().splitlines() or ["no output"])[-1]}
    result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return result


def write_files(folder: Path) -> None:
    """Write a VGG19 with random weights, and images with random pixels."""
    channels, tensors = 3, {}
    for number, width in enumerate([64] * 2 + [128] * 2 + [256] * 4 + [512] * 8):
        tensors[f"features.{number}.weight"] = torch.randn(width, channels, 3, 3) * (2 / (9 * channels)) ** 0.5
        tensors[f"features.{number}.bias"] = torch.zeros(width)
        channels = width
    safetensors.torch.save_file(tensors, folder / "vgg19.safetensors")
    write_random_rows(folder / "photos", 512, panels=1)
    write_random_rows(folder / "pairs", 512, panels=2)
    write_random_rows(folder / "rows", 512)


def print_row(row: dict[str, Any]) -> None:
    """Print one line of the table."""
    errors = [str(value) for key, value in row.items() if key.endswith("_error")]
    measured = row.get("allocated_gib", row.get("tensors_gib"))
    shown = [row.get(f"{key}_gib") for key in ("forecast", "tensors", "allocated", "first_step", "reserved")]
    numbers = "".join(f"{'–' if value is None else f'{value:.3f}':>11}" for value in shown)
    error = f"{row['forecast_gib'] / measured - 1:+8.1%}" if measured and "forecast_gib" in row else " " * 8
    print(f"{row['row']:44}{numbers}{error}  {'; '.join(errors)}", flush=True)


def measure_rows(names: Sequence[str], options: argparse.Namespace) -> None:
    """Compute all forecasts in the background, measure one row at a time, and write the results after each row."""
    rows: list[dict[str, Any]] = []
    columns = "".join(f"{name:>11}" for name in ("forecast", "tensors", "allocated", "first step", "reserved"))
    print(f"{'GiB':44}{columns}   error", flush=True)
    with ThreadPoolExecutor(options.jobs) as pool:
        forecasts: dict[str, Future[dict[str, Any]]] = {
            name: pool.submit(start, "forecast", name, options) for name in names
        }
        for name in names:
            measured = start("measure", name, options)
            rows.append({"row": name, "settings": ROWS[name], **measured, **forecasts[name].result()})
            print_row(rows[-1])
            write_results(options.json, options, rows=rows)


def main() -> None:
    """Compare all rows, or compute one part of one row."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--accelerator", default="cuda", help="cuda or cpu")
    parser.add_argument("--small", action="store_true", help="small batches, for a CPU")
    parser.add_argument("--jobs", type=int, default=6, help="number of forecasts that are computed at a time")
    parser.add_argument("--only", default="", help="measure only rows whose name contains this text")
    parser.add_argument("--json", default="", help="JSON file for the results, with versions and hardware")
    for flag in ("--part", "--row", "--folder"):
        parser.add_argument(flag, default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part:
        part = forecast_row if options.part == "forecast" else measure_row
        print(json.dumps(part(options.row, options)))
        return
    with tempfile.TemporaryDirectory() as folder:
        options.folder = folder
        write_files(Path(folder))
        measure_rows([name for name in ROWS if options.only in name], options)


if __name__ == "__main__":
    main()
