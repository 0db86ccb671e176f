"""Helpers for the benchmarks: variants that take turns, the engine's training step, random data, tables and JSON."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch
from PIL import Image

from paceline.commands.configure import configure
from paceline.runs.folder import RunFolder
from paceline.runs.metrics import MetricsWriter
from paceline.runs.provenance import versions_and_hardware
from paceline.runs.terminal import Display
from paceline.training.build import assemble
from paceline.training.loop import Loop, Outputs

WARMUP_STEPS = 14  # enough for the engine, which captures its CUDA graph after at most 11 eager steps
MAX_STEPS = 400
SIDE_PX, NUM_CLASSES = 32, 100  # of the random images that are small
Step = Callable[[], None]
Fit = Callable[[int], float]  # function that runs a number of steps and returns the elapsed seconds


@dataclass
class Variant:
    """One of several implementations of a workload, to be compared by speed."""

    name: str
    step: Step
    before: Callable[[], None] = lambda: None  # function that sets torch's global flags for this variant
    finish: Callable[[], None] = lambda: None  # function that ends a timed block
    after: Callable[[], None] = lambda: None  # function that releases this variant's resources
    warmup: int = 3
    images: int = 0  # images per step, if different from the workload's batch size
    length: int = 0  # number of steps per block; 0 for as many as fit in the block's duration
    rates: list[float] = field(default_factory=list)


def set_torch_defaults() -> None:
    """Set torch's global flags to their defaults."""
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.allow_tf32 = True
    torch.set_float32_matmul_precision("highest")


def engine_variant(name: str, recipe: str, folder: Path, *, delivers: bool = False, **settings: Any) -> Variant:
    """Return a variant that trains like `paceline train`, with data loading and metrics but without evaluation.

    If it delivers, the time of a block includes the delivery of its entries by the loggers.
    """
    fixed = {"epochs": 100_000, "save_every": "100000 epochs", "sample_every": "100000 epochs", "validation": 0}
    assignments = [f"{key}={value}" for key, value in (fixed | settings).items()]
    parts = assemble(configure(recipe, {}, assignments=assignments))
    run = folder / f"run-{name}"
    writer = MetricsWriter(run, loggers=parts.config.run.loggers)
    outputs = Outputs(RunFolder(run), writer, Display(parts.total_images, 0, name, enabled=False))
    loop = Loop(parts, outputs)
    parts.recipe.train()
    steps = parts.feed.steps(0, parts.total_images)
    for note in parts.notes:
        if note.startswith(("loader", "step", "compile")):
            print(f"    {name}: {note}")

    def close() -> None:
        writer.close()  # otherwise, TensorBoard's thread writes to a folder that the benchmark has removed
        for loader in parts.loaders.values():
            loader.close()

    def apply() -> None:
        parts.precision.apply(deterministic=False)

    finish = writer.flush if delivers else lambda: None
    return Variant(name, lambda: loop.advance(next(steps)), apply, finish, close, WARMUP_STEPS)


def engine_fit(name: str, recipe: str, folder: Path, device: torch.device, closing: ExitStack, **settings: Any) -> Fit:
    """Return a function that trains as in `engine_variant`; `closing` must close before the folder is removed."""
    variant = engine_variant(name, recipe, folder, **settings)
    closing.callback(variant.after)
    time_block(variant, variant.warmup, device)
    return lambda steps: time_block(variant, steps, device)


def capture(learn: Step, device: torch.device) -> Step:
    """Return the step as a CUDA graph, captured after a few eager steps on a side stream."""
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(5):
            learn()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        learn()

    def replay(keep_alive: Step = learn) -> None:  # the graph itself does not keep its tensors alive
        graph.replay()

    return replay


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def time_block(variant: Variant, num_steps: int, device: torch.device) -> float:
    """Return how many seconds a block of steps takes, including work queued on the device."""
    variant.before()
    synchronize(device)
    start = perf_counter()
    for _ in range(num_steps):
        variant.step()
    variant.finish()
    synchronize(device)
    return perf_counter() - start


def measure_interleaved(
    variants: list[Variant],
    images_per_step: int,
    seconds: float,
    repeats: int,
    device: torch.device,
    on_turn: Callable[[list[dict[str, Any]]], None] = lambda rows: None,
) -> list[dict[str, Any]]:
    """Return one row per variant: the median rate over interleaved blocks, and the speedup over the first variant.

    The speedup is the median ratio of neighbouring blocks, so that gradual changes in the machine's speed cancel
    out. `on_turn` is called with the rows after each block, so that an interruption loses nothing.
    """
    lengths = []
    for variant in variants:
        time_block(variant, variant.warmup, device)
        lengths.append(variant.length or _steps_per_block(variant, seconds, device))
    for repeat in range(repeats):
        order = list(zip(variants, lengths, strict=True))
        for variant, length in order if repeat % 2 == 0 else reversed(order):
            variant.rates.append(length * (variant.images or images_per_step) / time_block(variant, length, device))
            on_turn(summarise_rates({variant.name: variant.rates for variant in variants}, lengths))
    for variant in variants:
        variant.after()
    return summarise_rates({variant.name: variant.rates for variant in variants}, lengths)


def _steps_per_block(variant: Variant, seconds: float, device: torch.device) -> int:
    return max(2, min(MAX_STEPS, round(seconds / (time_block(variant, 2, device) / 2))))


def summarise_rates(rates: dict[str, list[float]], lengths: list[int]) -> list[dict[str, Any]]:
    """Return one row per variant that has been measured; the speedup uses the rounds that both variants have."""
    first = next(iter(rates.values()))
    ratios = {name: [one / other for one, other in zip(found, first, strict=False)] for name, found in rates.items()}
    return [
        {
            "variant": name,
            "images_per_second": float(np.median(found)),
            **spread(found),
            "steps_per_block": length,
            "speedup_over_first": [float(ratio) for ratio in np.percentile(ratios[name] or [np.nan], [25, 50, 75])],
        }
        for (name, found), length in zip(rates.items(), lengths, strict=True)
        if found
    ]


def spread(values: list[float]) -> dict[str, float]:
    """Return the lowest value, the highest value and the number of values."""
    return {"low": min(values), "high": max(values), "n": len(values)}


def print_rows(title: str, rows: list[dict[str, Any]]) -> None:
    """Print a table of variants."""
    print(title)
    print(f"  {'variant':34} {'images/s':>10}  {'low':>9} – {'high':>9}   n  speedup over the first (quartiles)")
    for row in rows:
        low, middle, high = row["speedup_over_first"]
        spread = f"{row['low']:9,.0f} – {row['high']:9,.0f}"
        ratio = f"{middle:.2f} ({low:.2f} – {high:.2f})"
        print(f"  {row['variant']:34} {row['images_per_second']:10,.0f}  {spread} {row['n']:3}  {ratio}", flush=True)


def write_small_images(folder: Path, samples: int) -> dict[str, np.ndarray]:
    """Write random images and labels to random.npz and return the arrays."""
    rng = np.random.default_rng(0)
    data: dict[str, np.ndarray] = {}
    for split, length in (("train", samples), ("test", 1)):
        data[f"x_{split}"] = rng.integers(256, size=(length, SIDE_PX, SIDE_PX, 3), dtype=np.uint8)
        data[f"y_{split}"] = rng.integers(NUM_CLASSES, size=length)
    data["y_test"][0] = NUM_CLASSES - 1  # the largest label determines the number of classes
    np.savez(folder / "random.npz", **data)  # type: ignore[arg-type]
    return data


def write_random_rows(folder: Path, side_px: int, panels: int = 6, count: int = 2) -> None:
    """Write rows of panels with random pixels for each split; with one panel, they are like photographs."""
    generator = np.random.default_rng(0)
    for split in ("train", "test"):
        (folder / split).mkdir(parents=True)
        for number in range(count):
            row = generator.integers(256, size=(side_px, panels * side_px, 3), dtype=np.uint8)
            Image.fromarray(row).save(folder / split / f"{number}.png", compress_level=0)


def endless(loader: Any) -> Iterator[Any]:
    """Iterate over a DataLoader endlessly; each epoch starts new workers, as in plain scripts."""
    while True:
        yield from loader


def write_results(path: str, options: argparse.Namespace, **content: Any) -> None:
    """Write the results, versions and hardware to a JSON file, unless the path is empty."""
    if path:
        chosen = {name: str(value) for name, value in vars(options).items()}
        results = {"provenance": versions_and_hardware(), "options": chosen, **content}
        Path(path).write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n")
