"""What the scripts share: sides whose blocks of steps take turns, the engine's own step, tables and JSON."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch

from paceline.commands.configure import configure
from paceline.runs.display import Display
from paceline.runs.folder import RunFolder
from paceline.runs.metrics import MetricsWriter
from paceline.runs.provenance import versions_and_hardware
from paceline.training.build import assemble
from paceline.training.evaluate import training_evaluator
from paceline.training.loop import Loop, Outputs

WARMUP_STEPS = 14  # a captured step is captured after 11 eager ones
MAX_STEPS = 400


@dataclass
class Side:
    """One way to do the same work."""

    name: str
    step: Callable[[], None]
    before: Callable[[], None] = lambda: None  # sets torch's switches as this side has them
    after: Callable[[], None] = lambda: None  # ends what it started
    warmup: int = 3
    images: int = 0  # of a step, where it is not the batch of the workload
    length: int = 0  # steps of a block, where they are not chosen by their duration
    rates: list[float] = field(default_factory=list)


def torch_defaults() -> None:
    """The switches of torch as a script finds them."""
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.allow_tf32 = True
    torch.set_float32_matmul_precision("highest")


def engine_side(name: str, recipe: str, folder: Path, **settings: Any) -> Side:
    """The engine's loop as `paceline train` runs it, data and written metrics included, but for judging."""
    fixed = {"epochs": 100_000, "save_every": "100000 epochs", "sample_every": "100000 epochs", "validation": 0}
    assignments = [f"{key}={value}" for key, value in (fixed | settings).items()]
    parts = assemble(configure(recipe, {}, assignments=assignments))
    parts.recipe.evaluator = ""
    run = folder / f"run-{name}"
    writer = MetricsWriter(run, loggers=parts.config.run.loggers)
    outputs = Outputs(RunFolder(run), writer, Display(parts.total_images, 0, name, enabled=False))
    loop = Loop(parts, outputs, evaluator=training_evaluator(parts))
    parts.recipe.train()
    steps = parts.feed.steps(0, parts.total_images)
    for note in parts.notes:
        if note.startswith(("loader", "step", "compile")):
            print(f"    {name}: {note}")

    def close() -> None:
        for loader in parts.loaders.values():
            loader.close()

    def apply() -> None:
        parts.precision.apply(deterministic=False)

    return Side(name, lambda: loop.advance(next(steps)), apply, close, WARMUP_STEPS)


def wait_for(device: torch.device) -> None:
    """Returns when the device has nothing left to do."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def block(side: Side, num_steps: int, device: torch.device) -> float:
    """The seconds of some steps, until the device is done."""
    side.before()
    wait_for(device)
    start = perf_counter()
    for _ in range(num_steps):
        side.step()
    wait_for(device)
    return perf_counter() - start


def take_turns(
    sides: list[Side],
    images_per_step: int,
    seconds: float,
    repeats: int,
    device: torch.device,
    keep: Callable[[list[dict[str, Any]]], None] = lambda rows: None,
) -> list[dict[str, Any]]:
    """A row per side: the median rate over blocks that take turns, and how many times as fast it is as the first.

    Neighbouring blocks are divided by each other before the median is taken, so that a machine whose speed drifts
    drifts out of the ratio. `keep` gets the rows after each turn of all sides.
    """
    lengths = []
    for side in sides:
        block(side, side.warmup, device)
        lengths.append(side.length or max(2, min(MAX_STEPS, round(seconds / (block(side, 2, device) / 2)))))
    for repeat in range(repeats):
        order = list(zip(sides, lengths, strict=True))
        for side, length in order if repeat % 2 == 0 else reversed(order):
            side.rates.append(length * (side.images or images_per_step) / block(side, length, device))
        keep(rates_as_rows({side.name: side.rates for side in sides}, lengths))
    for side in sides:
        side.after()
    return rates_as_rows({side.name: side.rates for side in sides}, lengths)


def rates_as_rows(rates: dict[str, list[float]], lengths: list[int]) -> list[dict[str, Any]]:
    """A row for each side, from as many rates of each."""
    first = np.array(next(iter(rates.values())))
    return [
        {
            "side": name,
            "images_per_second": float(np.median(found)),
            **spread(found),
            "steps_per_block": length,
            "times_the_first": [float(ratio) for ratio in np.percentile(np.array(found) / first, [25, 50, 75])],
        }
        for (name, found), length in zip(rates.items(), lengths, strict=True)
    ]


def spread(found: list[float]) -> dict[str, float]:
    """The lowest, the highest and the number of what was found."""
    return {"low": min(found), "high": max(found), "n": len(found)}


def print_rows(title: str, rows: list[dict[str, Any]]) -> None:
    """A table of sides."""
    print(title)
    print(f"  {'side':34} {'images/s':>10}  {'low':>9} – {'high':>9}   n  times the first (quartiles)")
    for row in rows:
        low, middle, high = row["times_the_first"]
        spread = f"{row['low']:9,.0f} – {row['high']:9,.0f}"
        ratio = f"{middle:.2f} ({low:.2f} – {high:.2f})"
        print(f"  {row['side']:34} {row['images_per_second']:10,.0f}  {spread} {row['n']:3}  {ratio}", flush=True)


def endless(loader: Any) -> Iterator[Any]:
    """Epoch after epoch of a DataLoader, which starts its workers anew for each, as scripts do."""
    while True:
        yield from loader


def keep_json(path: str, options: argparse.Namespace, **content: Any) -> None:
    """Writes the numbers with versions and hardware, where a file is named."""
    if path:
        chosen = {name: str(value) for name, value in vars(options).items()}
        kept = {"provenance": versions_and_hardware(), "options": chosen, **content}
        Path(path).write_text(json.dumps(kept, indent=1, ensure_ascii=False) + "\n")
