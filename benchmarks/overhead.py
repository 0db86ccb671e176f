"""Measure the engine's overhead: the throughput of its training step compared with a hand-written eager loop.

Both variants train the same ResNet on the same random images, held on the device as uint8, with pad-crop, flip,
bf16 autocast, channels_last and fused SGD. Blocks of steps are interleaved, so that a slowdown of the machine affects
both. A block ends when the device has finished its work.

    PYTHONPATH=src python benchmarks/overhead.py --json overhead.json
    PYTHONPATH=src python benchmarks/overhead.py --samples 512 --width 4 --batches 8 --steps 2 --repeats 2   # on a CPU
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from _variants import synchronize
from torch import Tensor

from paceline.models.resnet import ResNet
from paceline.runs.folder import RunFolder
from paceline.runs.metrics import MetricsWriter
from paceline.runs.provenance import versions_and_hardware
from paceline.runs.recipe import resolve_config
from paceline.runs.terminal import Display
from paceline.training.build import assemble
from paceline.training.evaluate import training_evaluator
from paceline.training.loop import Loop, Outputs

SIDE_PX, PADDING_PX, NUM_CLASSES = 32, 4, 100
LOG_EVERY_STEPS = 50  # both variants copy their losses to the host at this interval, as in training
EPOCHS = 1000  # more epochs than any measurement needs
LEARNER = {"lr": 0.1, "momentum": 0.9, "weight_decay": 5e-4}

Step = Callable[[], None]


class Kind(NamedTuple):
    """How both variants run their step."""

    name: str
    captured: bool = False  # as a CUDA graph
    compiled: bool = False


EAGER, CAPTURED, COMPILED = Kind(""), Kind(", graph", True), Kind(", graph, compiled", True, True)


def random_data(num_samples: int) -> dict[str, np.ndarray]:
    """Return images and labels in the layout of an .npz source."""
    generator = np.random.default_rng(0)
    data: dict[str, np.ndarray] = {}
    for split, length in (("train", num_samples), ("test", 1)):
        data[f"x_{split}"] = generator.integers(256, size=(length, SIDE_PX, SIDE_PX, 3), dtype=np.uint8)
        data[f"y_{split}"] = generator.integers(NUM_CLASSES, size=length)
    data["y_test"][0] = NUM_CLASSES - 1  # the largest label determines the number of classes
    return data


def hand_written_step_factory(
    data: dict[str, np.ndarray], batch_size: int, width: int, device: torch.device, kind: Kind
) -> Step:
    """Return the training step of an optimised loop written by hand for this network.

    If the step is captured, it is replayed afterwards, which shows how fast the engine's captured step could be.
    """
    torch.backends.cudnn.benchmark = True
    torch.manual_seed(0)
    network = ResNet(18, NUM_CLASSES, stem="small", width=width).to(device)
    if device.type == "cuda":
        network = network.to(memory_format=torch.channels_last)
    if kind.compiled:
        network.compile(dynamic=False)
    rate = torch.tensor(LEARNER["lr"], device=device)
    settings: dict[str, Any] = {**LEARNER, "lr": rate}
    optimizer = torch.optim.SGD(network.parameters(), **settings, nesterov=True, fused=device.type == "cuda")
    images = torch.from_numpy(data["x_train"]).to(device)
    padded = F.pad(images, (0, 0, *[PADDING_PX] * 4))
    labels = torch.from_numpy(data["y_train"]).to(device)
    side = torch.arange(SIDE_PX, device=device)
    total_steps = EPOCHS * len(labels) // batch_size
    loss_sum = torch.zeros((), device=device)
    order = torch.randperm(len(labels), device=device)
    index = order[:batch_size].clone()
    number = position = 0

    def make_batch() -> tuple[Tensor, Tensor]:
        top, left = torch.randint(2 * PADDING_PX + 1, (2, batch_size, 1), device=device)
        flipped = torch.rand(batch_size, 1, device=device) < 0.5
        rows, columns = top + side, left + torch.where(flipped, SIDE_PX - 1 - side, side)
        crops = padded[index[:, None, None], rows[:, :, None], columns[:, None, :]]
        return crops.permute(0, 3, 1, 2).float() / 127.5 - 1, labels[index]

    def learn() -> None:
        batch, label = make_batch()
        with torch.autocast(device.type, torch.bfloat16):
            loss = F.cross_entropy(network(batch), label)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        loss_sum.add_(loss.detach())

    run = capture(learn, device) if kind.captured else learn

    def step() -> None:
        nonlocal order, position, number
        if position + batch_size > len(labels):
            order, position = torch.randperm(len(labels), device=device), 0
        index.copy_(order[position : position + batch_size])
        position += batch_size
        rate.fill_(LEARNER["lr"] * 0.5 * (1 + math.cos(math.pi * number / total_steps)))
        run()
        number += 1
        if number % LOG_EVERY_STEPS == 0:
            loss_sum.item()
            loss_sum.zero_()

    return step


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


def engine_step_factory(data_file: Path, batch_size: int, width: int, device: torch.device, kind: Kind) -> Step:
    """Return the training step of `paceline train`, which also writes metrics."""
    settings = {
        "data": "npz",
        "data_root": str(data_file),
        "accelerator": device.type,
        "loader": "resident",
        "batch_size": batch_size,
        "precision": "bf16",
        "graph": "on" if kind.captured else "off",
        "compile": "on" if kind.compiled else "off",
        "epochs": EPOCHS,
        "validation": 0,
        "pad_crop": PADDING_PX,
        "flip": "on",
        "stem": "small",
        "width": width,
        "optimizer": "sgd",
        "schedule": "cosine",
        "warmup": "0 images",
        "log_every": f"{LOG_EVERY_STEPS} steps",
        "save_every": f"{EPOCHS} epochs",
        **LEARNER,
    }
    config = resolve_config("classification", [("benchmark", settings)])
    parts = assemble(config)
    folder = data_file.with_name(f"run-{batch_size}{kind.name}")
    writer = MetricsWriter(folder, loggers=config.run.loggers)
    outputs = Outputs(RunFolder(folder), writer, Display(parts.total_images, 0, "overhead", enabled=False))
    loop = Loop(parts, outputs, evaluator=training_evaluator(parts))
    parts.recipe.train()
    steps = parts.feed.steps(0, parts.total_images)
    return lambda: loop.advance(next(steps))


def images_per_second(step: Step, num_steps: int, batch_size: int, device: torch.device) -> float:
    """Return the throughput of one block of steps."""
    synchronize(device)
    start = perf_counter()
    for _ in range(num_steps):
        step()
    synchronize(device)
    return num_steps * batch_size / (perf_counter() - start)


def measure(
    variants: dict[str, Step], batch_size: int, num_steps: int, repeats: int, device: torch.device
) -> list[dict[str, Any]]:
    """Return one row per variant: the median rate over interleaved blocks, and the step time relative to the first.

    The ratio is the median over neighbouring blocks, so that gradual changes in the machine's speed cancel out.
    """
    rates: dict[str, list[float]] = {name: [] for name in variants}
    for step in variants.values():
        images_per_second(step, num_steps, batch_size, device)
    for repeat in range(repeats):
        names = list(variants) if repeat % 2 == 0 else list(reversed(variants))
        for name in names:
            rates[name].append(images_per_second(variants[name], num_steps, batch_size, device))
    first = np.array(next(iter(rates.values())))
    return [
        {
            "variant": name,
            "time_over_first": [float(ratio) for ratio in np.percentile(first / np.array(found), [25, 50, 75])],
            "batch_size": batch_size,
            "images_per_second": float(np.median(found)),
            "low": min(found),
            "high": max(found),
            "n": len(found),
            "steps_per_block": num_steps,
        }
        for name, found in rates.items()
    ]


def main() -> None:
    """Measure each batch size, print a table and write the results as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", default="128,512", help="comma-separated batch sizes")
    parser.add_argument("--width", type=int, default=64, help="channels of the network's first stage")
    parser.add_argument("--samples", type=int, default=50_000, help="number of images")
    parser.add_argument("--steps", type=int, default=50, help="steps per block")
    parser.add_argument("--repeats", type=int, default=31, help="number of blocks per variant")
    parser.add_argument("--graph", action="store_true", help="also measure both with the step in a CUDA graph")
    parser.add_argument("--compile", action="store_true", help="also measure both in a CUDA graph and compiled")
    parser.add_argument("--json", type=Path, help="JSON file for the results")
    arguments = parser.parse_args()

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    data, rows = random_data(arguments.samples), []
    headings = f"{'images/s':>9}  {'low':>9} – {'high':>9}   n  step time ÷ that of the hand-written loop (quartiles)"
    print(f"{'batch':>5}  {'variant':30} {headings}")
    with tempfile.TemporaryDirectory() as folder:
        data_file = Path(folder) / "random.npz"
        np.savez(data_file, **data)  # type: ignore[arg-type]
        for batch_size in map(int, arguments.batches.split(",")):
            sizes = (batch_size, arguments.width, device)
            kinds = [EAGER, *([CAPTURED] if arguments.graph else []), *([COMPILED] if arguments.compile else [])]
            for kind in kinds:
                pair = {
                    f"hand-written{kind.name}": hand_written_step_factory(data, *sizes, kind),
                    f"engine{kind.name}": engine_step_factory(data_file, *sizes, kind),
                }
                found = measure(pair, batch_size, arguments.steps, arguments.repeats, device)
                rows += found
                for row in found:
                    spread = f"{row['low']:9,.0f} – {row['high']:9,.0f}"
                    low, median, high = row["time_over_first"]
                    ratio = f"{median:.3f} ({low:.3f} – {high:.3f})"
                    rate = f"{row['images_per_second']:9,.0f}"
                    print(f"{batch_size:5}  {row['variant']:30} {rate}  {spread} {row['n']:3}  {ratio}", flush=True)
                if arguments.json:
                    content = {"provenance": versions_and_hardware(), "width": arguments.width, "rows": rows}
                    arguments.json.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
