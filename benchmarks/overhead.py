"""Measure the engine's overhead: the throughput of its training step compared with a hand-written loop.

Both variants train the same ResNet on the same random images, held on the device as uint8, with pad-crop, flip,
bf16 autocast, channels_last and fused SGD. Blocks of steps are interleaved, so that a slowdown of the machine affects
both. A block ends when the device has finished its work.

    PYTHONPATH=src python benchmarks/overhead.py --json overhead.json
    PYTHONPATH=src python benchmarks/overhead.py --samples 512 --width 4 --batches 8 --steps 2 --repeats 2   # on a CPU
"""

from __future__ import annotations

import argparse
import math
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from _variants import (
    NUM_CLASSES,
    SIDE_PX,
    Step,
    Variant,
    capture,
    engine_variant,
    measure_interleaved,
    print_rows,
    write_results,
    write_small_images,
)
from torch import Tensor

from paceline.models.resnet import ResNet

PADDING_PX = 4
LOG_EVERY_STEPS = 50  # both variants copy their losses to the host at this interval, as in training
EPOCHS = 1000  # more epochs than any measurement needs
LEARNER = {"lr": 0.1, "momentum": 0.9, "weight_decay": 5e-4}


class Kind(NamedTuple):
    """How both variants run their step."""

    name: str
    captured: bool = False  # as a CUDA graph
    compiled: bool = False


EAGER, CAPTURED, COMPILED = Kind(""), Kind(", graph", True), Kind(", graph, compiled", True, True)


def hand_written_step(
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


def engine(folder: Path, batch_size: int, width: int, device: torch.device, kind: Kind) -> Variant:
    """Return the training step of `paceline train`, which also writes metrics."""
    settings: dict[str, Any] = {
        "data": "npz",
        "data_root": folder / "random.npz",
        "accelerator": device.type,
        "loader": "resident",
        "batch_size": batch_size,
        "precision": "bf16",
        "graph": "on" if kind.captured else "off",
        "compile": "on" if kind.compiled else "off",
        "pad_crop": PADDING_PX,
        "flip": "on",
        "stem": "small",
        "width": width,
        "optimizer": "sgd",
        "schedule": "cosine",
        "warmup": "0 images",
        "log_every": f"{LOG_EVERY_STEPS} steps",
        **LEARNER,
    }
    return engine_variant(f"engine{kind.name}", "classification", folder / str(batch_size), **settings)


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
    parser.add_argument("--json", default="", help="JSON file for the results, with versions and hardware")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    kinds = [EAGER, *([CAPTURED] if options.graph else []), *([COMPILED] if options.compile else [])]
    results: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        data = write_small_images(Path(folder), options.samples)
        for batch_size in map(int, options.batches.split(",")):
            for kind in kinds:
                step = hand_written_step(data, batch_size, options.width, device, kind)
                variants = [
                    Variant(f"hand-written{kind.name}", step),
                    engine(Path(folder), batch_size, options.width, device, kind),
                ]
                for variant in variants:
                    variant.length = options.steps
                rows = measure_interleaved(variants, batch_size, 0.0, options.repeats, device)
                print_rows(f"ResNet-18, batch {batch_size}, {device.type}", rows)
                results += [{**row, "batch_size": batch_size} for row in rows]
                write_results(options.json, options, rows=results)


if __name__ == "__main__":
    main()
