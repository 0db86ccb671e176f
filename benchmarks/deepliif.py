"""Measure DeepLIIF at full size: the cost of a step, and the results of training on a few images for a few minutes.

A row is an image file with several panels side by side: the input, the modalities and the segmentation.

`step` times one step of the whole model (512 pixels, batch 1, 4 modalities: 9 generators, 9 discriminators) on random
rows, with several combinations of precision, CUDA graph and compilation. `train` trains on a folder of rows for a
given number of minutes and writes strips of its predictions for the training and test rows.

    PYTHONPATH=src python benchmarks/deepliif.py step --json step.json
    PYTHONPATH=src python benchmarks/deepliif.py train --data-root ROWS --minutes 8 --out strips
    PYTHONPATH=src python benchmarks/deepliif.py step --small --repeats 2    # tiny networks, on a CPU
"""

from __future__ import annotations

import argparse
import gc
import json
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch
from PIL import Image

from paceline.benchmarking.self_test import measure
from paceline.commands.configure import configure
from paceline.data.feed import BatchPipeline, StepData, evaluation_batches
from paceline.data.transforms import to_eight_bits
from paceline.images.grids import captioned, side_by_side, to_image
from paceline.runs.provenance import versions_and_hardware
from paceline.training.build import Parts, assemble
from paceline.training.graph import eager_steps
from paceline.training.loss_log import LossLog

SMALL = {
    "generator": "resnet_6",
    "segmentation_generator": "unet_32",
    "ngf": 2,
    "ndf": 2,
    "d_layers": 1,
    "size": 32,
    "crop": 0,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "fp32 eager": {"precision": "fp32", "graph": "off"},
    "tf32 eager": {"precision": "tf32", "graph": "off"},
    "bf16 eager": {"precision": "bf16", "graph": "off"},
    "bf16 graph": {"precision": "bf16", "graph": "on"},
    "bf16 graph compiled": {"precision": "bf16", "graph": "on", "compile": True},
}
REPORT_SECONDS = 30


def make_parts(data_root: Path, small: bool, assignments: list[str], **settings: Any) -> Parts:
    """Assemble the engine for a DeepLIIF run."""
    given: dict[str, Any] = {
        "preset": "deepliif",
        "data_root": str(data_root),
        "validation": 0,
        "loader": "resident",
        "compile": False,
    }
    return assemble(configure("translation", given | (SMALL if small else {}) | settings, assignments=assignments))


def endless_steps(parts: Parts) -> Iterator[StepData]:
    """Return the data for a practically endless sequence of steps."""
    return parts.feed.steps(0, 2**62)


def write_random_rows(folder: Path, side_px: int, panels: int = 6) -> None:
    """Write two rows of panels with random pixels for each split."""
    generator = np.random.default_rng(0)
    for split in ("train", "test"):
        (folder / split).mkdir(parents=True)
        for number in range(2):
            row = generator.integers(256, size=(side_px, panels * side_px, 3), dtype=np.uint8)
            Image.fromarray(row).save(folder / split / f"{number}.png")


def time_step(name: str, folder: Path, small: bool, assignments: list[str], repeats: int) -> dict[str, Any]:
    """Return one variant's images per second and peak memory."""
    parts = make_parts(folder, small, assignments, **VARIANTS[name], images=10**6)
    device = parts.world.device
    steps = endless_steps(parts)
    parts.recipe.train()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    warmup = eager_steps(parts.strategy) + 3 if device.type == "cuda" else 1
    timing = measure(lambda: parts.run_step(next(steps)), device=device, warmup=warmup, repeats=repeats)
    batch = parts.feed.images_per_step
    row = {
        "variant": name,
        "images_per_second": batch / timing.median,
        "low": batch / timing.high,
        "high": batch / timing.low,
        "n": timing.n,
        "batch": batch,
        "parameters": sum(parameter.numel() for parameter in parts.recipe.parameters()),
    }
    if device.type == "cuda":
        row["peak_gib"] = torch.cuda.max_memory_allocated(device) / 2**30
        row["reserved_gib"] = torch.cuda.max_memory_reserved(device) / 2**30
        row["captured"] = not getattr(parts.run_step, "failed", True)
        row["notes"] = [note for note in parts.notes if note.startswith(("compile", "step"))]
    return row


def run_step_benchmark(arguments: argparse.Namespace) -> None:
    """Time the variants in turn, print a table and write the results as JSON."""
    on_gpu = torch.cuda.is_available()
    requested = arguments.variants.split(",") if arguments.variants else list(VARIANTS)
    names = [name for name in requested if on_gpu or VARIANTS[name]["graph"] == "off"]
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        write_random_rows(Path(folder) / "rows", 32 if arguments.small else 512)
        for name in names:
            try:
                rows.append(time_step(name, Path(folder) / "rows", arguments.small, arguments.set, arguments.repeats))
            except Exception as error:  # if one variant fails, measure the others
                rows.append({"variant": name, "error": f"{type(error).__name__}: {error}"[:500]})
            gc.collect()
            if on_gpu:
                torch.cuda.empty_cache()
            print(describe(rows[-1], rows[0]), flush=True)
            if arguments.json:
                content = {"provenance": versions_and_hardware(), "set": arguments.set, "rows": rows}
                arguments.json.write_text(json.dumps(content, indent=1) + "\n")


def describe(row: dict[str, Any], first: dict[str, Any]) -> str:
    """Return one variant's result as a line of text."""
    if "error" in row:
        return f"{row['variant']:20} failed: {row['error'].splitlines()[0]}"
    speedup = row["images_per_second"] / first["images_per_second"] if "images_per_second" in first else float("nan")
    memory = f"  peak {row['peak_gib']:.1f} GiB (reserved {row['reserved_gib']:.1f})" if "peak_gib" in row else ""
    captured = "" if row.get("captured", True) or "graph" not in row["variant"] else "  NOT captured"
    spread = f"{row['low']:.2f} – {row['high']:.2f}, n {row['n']}"
    return f"{row['variant']:20} {row['images_per_second']:7.2f} images/s ({spread})  ×{speedup:.2f}{memory}{captured}"


def run_training(arguments: argparse.Namespace) -> None:
    """Train for a fixed time; the learning rate is constant for the first half, then falls to zero."""
    settings = {"precision": arguments.precision, "images": 10**6, "flip": "on", "compile": arguments.compile}
    parts = make_parts(arguments.data_root, arguments.small, arguments.set, **settings)
    arguments.out.mkdir(parents=True, exist_ok=True)
    print("\n".join(parts.notes), flush=True)
    seconds, start = arguments.minutes * 60, perf_counter()
    peak = {name: parts.config.learner_of(name).lr for name in parts.step.learners}
    for name, learner in parts.step.learners.items():
        learner.learning_rate = rate_by_time(peak[name], start, seconds)
    loss_log, history, number, reported = LossLog(parts.world), [], 0, start
    parts.recipe.train()
    for data in endless_steps(parts):
        loss_log.add(data.images, parts.run_step(data))
        number += 1
        if perf_counter() - reported > REPORT_SECONDS or perf_counter() - start > seconds:
            values = loss_log.request().wait().values  # waits for the device, so the time is accurate
            reported = perf_counter()
            history.append({"step": number, "seconds": reported - start, **values})
            shown = {name: f"{value:.3g}" for name, value in values.items() if name.endswith("distance")}
            print(f"step {number:6} {reported - start:6.0f} s", *(f"{k} {v}" for k, v in shown.items()), flush=True)
        if perf_counter() - start > seconds:
            break
    elapsed = perf_counter() - start
    for split in ("train", "test"):
        write_strips(parts, split, arguments.out / f"{split}.png", arguments.panel_px)
    images = number * parts.feed.images_per_step
    content = {"provenance": versions_and_hardware(), "minutes": elapsed / 60, "images": images, "set": arguments.set}
    content |= {"settings": parts.config.values(), "history": history}
    (arguments.out / "training.json").write_text(json.dumps(content, indent=1) + "\n")
    print(f"{number} steps, {images} images in {elapsed:.0f} s ({images / elapsed:.2f} images/s) → {arguments.out}")


def rate_by_time(peak: float, start: float, seconds: float) -> Callable[[int], float]:
    """Return a learning rate that depends only on the time since the start."""
    return lambda images: peak * min(1.0, max(0.0, 2 * (1 - (perf_counter() - start) / seconds)))


@torch.no_grad()
def write_strips(parts: Parts, split: str, file: Path, panel_px: int) -> None:
    """Write a strip for each row of a split: the input, and each predicted panel next to the real panel, if any."""
    parts.recipe.eval()
    strips = []
    for batch in evaluation_batches(BatchPipeline(parts.loaders[split], None, parts.precision.weights), 0, 1):
        with parts.precision.autocast():
            made = parts.recipe.predict(batch)
        for number in range(len(batch["image"])):
            sample = {name: value[number] for name, value in batch.items()}
            panels = {"input": sample["image"]}
            for name, panel in made.items():
                panels[name] = panel[number]
                if not torch.equal(sample[name], sample["image"]):
                    panels[f"real {name}"] = sample[name]
            strips.append(side_by_side([to_panel(image, name, panel_px) for name, image in panels.items()]))
    parts.recipe.train()
    side_by_side(strips, vertical=True).save(file)


def to_panel(image: torch.Tensor, caption: str, panel_px: int) -> Image.Image:
    """Convert an image with values in [-1, 1] to a captioned panel."""
    panel = to_image(to_eight_bits(image).permute(1, 2, 0).cpu().numpy())
    return captioned(panel.resize((panel_px, panel_px), Image.Resampling.BOX), caption)


def main() -> None:
    """Parse the arguments and run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, dest="command")
    step = commands.add_parser("step", help="time one step")
    step.add_argument(
        "--variants", default="", help=f"comma-separated variants out of {', '.join(VARIANTS)} (default: all)"
    )
    step.add_argument("--repeats", type=int, default=30, help="number of timed steps")
    step.add_argument("--json", type=Path, help="JSON file for the results")
    train = commands.add_parser("train", help="train on a folder of rows")
    train.add_argument("--data-root", type=Path, required=True, help="folder with train/ and test/")
    train.add_argument("--minutes", type=float, default=8.0, help="training time in minutes")
    train.add_argument("--out", type=Path, required=True, help="folder for train.png, test.png and training.json")
    train.add_argument("--precision", default="auto", help="training precision")
    train.add_argument("--panel-px", type=int, default=256, help="side length of a panel in the strips, in pixels")
    train.add_argument("--compile", action="store_true", help="compile the networks")
    for command in (step, train):
        command.add_argument(
            "--small", action="store_true", help="use tiny networks at 32 pixels, to try the script on a CPU"
        )
        command.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="a setting of the run")
    arguments = parser.parse_args()
    (run_step_benchmark if arguments.command == "step" else run_training)(arguments)


if __name__ == "__main__":
    main()
