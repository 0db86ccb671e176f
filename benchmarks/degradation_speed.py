"""Measure how fast Real-ESRGAN's degradation is on the device, with Triton kernels and with PyTorch's operations.

The variants degrade whole batches of crops that are on the device, eager and, on a GPU, as one CUDA graph. They compute
the same steps with the same parameters, from the same table of random numbers. The variants take turns.

    PYTHONPATH=src python benchmarks/degradation_speed.py --json degradation_speed.json
    PYTHONPATH=src python benchmarks/degradation_speed.py --batch 4 --crop 64 --seconds 1   # on a CPU
"""

from __future__ import annotations

import argparse

import numpy as np
import torch
from _variants import Variant, measure_interleaved, print_rows, write_results
from numpy.typing import NDArray
from torch import Tensor

from paceline.data.bundled import FOLDER
from paceline.images.decode import decode
from paceline.images.degradation import second_order
from paceline.images.degradation.second_order import (
    NUM_NUMBERS,
    Steps,
    degrade,
    fastest_steps,
)

SCALE = 4
TABLE_ROWS = 4096  # rows of random numbers, used in turn
STEPS_PER_TURN = {"Triton": 200, "PyTorch": 20}  # on a GPU
PHOTOGRAPHS = ("astronaut.webp", "coffee.webp", "chelsea.webp", "motorcycle_left.webp")


def load_crops(side: int) -> NDArray[np.uint8]:
    """Return 64 square crops of bundled photographs."""
    chance = np.random.default_rng(0)
    images = [np.array(decode(FOLDER / name).convert("RGB")) for name in PHOTOGRAPHS]
    crops = []
    for number in range(64):
        image = images[number % len(images)]
        top, left = (int(chance.integers(length - side + 1)) for length in image.shape[:2])
        crops.append(image[top : top + side, left : left + side])
    return np.stack(crops)


def device_variants(
    crops: NDArray[np.uint8], table: Tensor, batch: int, device: torch.device, steps: Steps
) -> list[Variant]:
    """Return the variants that degrade on the device: eager and, on a GPU, as a CUDA graph."""
    kind = "PyTorch" if steps is second_order.TORCH_STEPS else "Triton"
    stored = torch.from_numpy(crops).permute(0, 3, 1, 2).to(device)
    generator = torch.Generator(device).manual_seed(0)
    chosen, rows = (torch.zeros(batch, dtype=torch.int64, device=device) for _ in range(2))
    uniforms = table.to(device)

    def degrade_batch() -> Tensor:
        images = stored[chosen].float() / 127.5 - 1
        return degrade(images, uniforms[rows], SCALE, steps=steps)

    def draw() -> None:
        chosen.random_(0, len(stored), generator=generator)
        rows.random_(0, TABLE_ROWS, generator=generator)

    def eager() -> None:
        draw()
        degrade_batch()

    length = STEPS_PER_TURN[kind] if device.type == "cuda" else 0
    variants = [Variant(f"{device.type}, {kind}, eager", eager, length=length)]
    if device.type == "cuda":
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for _ in range(3):
                eager()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            degrade_batch()

        def replay() -> None:
            draw()
            graph.replay()

        variants.append(Variant(f"cuda, {kind}, one CUDA graph", replay, length=length))
    return variants


def main() -> None:
    """Measure both sides in turns, print a table and write the results as JSON after every turn."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=48, help="images per batch (default: 48)")
    parser.add_argument("--crop", type=int, default=256, help="side of the crops in pixels (default: 256)")
    parser.add_argument("--seconds", type=float, default=4.0, help="duration of a turn on a CPU (default: 4)")
    parser.add_argument("--repeats", type=int, default=5, help="turns per variant (default: 5)")
    parser.add_argument("--json", default="", help="JSON file for the results, with versions and hardware")
    options = parser.parse_args()
    torch.set_grad_enabled(False)
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    crops = load_crops(options.crop)
    table = torch.rand(TABLE_ROWS, NUM_NUMBERS, generator=torch.Generator().manual_seed(0))
    variants: list[Variant] = []
    fastest = fastest_steps(torch.empty(0, device=device))
    for steps in dict.fromkeys((fastest, second_order.TORCH_STEPS)):
        variants += device_variants(crops, table, options.batch, device, steps)
    title = f"degradation, {options.crop} px crops, ×{SCALE}, batch {options.batch}, {device}"
    rows = measure_interleaved(
        variants,
        options.batch,
        options.seconds,
        options.repeats,
        device,
        lambda found: write_results(options.json, options, rows=found),
    )
    print_rows(title, rows)


if __name__ == "__main__":
    main()
