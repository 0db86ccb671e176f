"""Measure the training speed of r3gan: the engine's captured step against the same step in a plain bf16 loop.

All variants train the same networks with the same losses, penalties, optimizer settings and batch size on random
images of CIFAR-10's size. The plain loops repeat one batch on the device and draw new noise in each step. The engine
also loads its data. "compiled" compiles the networks with torch.compile. The penalties need the gradients of the
scores: the discriminator returns them, or, with "autograd", the loop differentiates the scores twice, as most scripts
do. Blocks of the variants take turns; the JSON file is written after every turn. The
share of the peak is computed from the operations of one step.

    PYTHONPATH=src python benchmarks/r3gan_speed.py --json r3gan_speed.json
    PYTHONPATH=src python benchmarks/r3gan_speed.py --tiny    # on a CPU: shows that every variant runs
"""

from __future__ import annotations

import argparse
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from _variants import (
    Variant,
    engine_variant,
    measure_interleaved,
    print_rows,
    set_torch_defaults,
    synchronize,
    write_results,
)
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from paceline.models.r3gan import Discriminator, Generator, Sizes

SIDE_PX, CHANNELS, NOISE, NUM_IMAGES = 32, 3, 64, 5120
EMA_HALF_LIFE = 500_000
VARIANTS = ("plain, autograd", "plain, autograd, compiled", "plain", "plain, compiled", "engine", "engine, compiled")


class PlainLoop:
    """The step of r3gan as in a plain script: two optimizers, autocast, an EMA."""

    def __init__(self, options: argparse.Namespace, device: torch.device, name: str) -> None:
        torch.manual_seed(0)
        self.device, self.batch, self.by_autograd = device, options.batch, "autograd" in name
        sizes = Sizes(
            SIDE_PX,
            CHANNELS,
            nz=NOISE,
            width=options.width,
            full_width_px=options.full_width_px,
            num_blocks=options.blocks,
            group_size=options.group_size,
        )
        self.generator, self.discriminator = Generator(sizes).to(device), Discriminator(sizes).to(device)
        for network in (self.generator, self.discriminator):
            network.to(memory_format=torch.channels_last)
            if name.endswith("compiled"):
                network.compile(dynamic=False)
        self.ema = [parameter.detach().clone() for parameter in self.generator.parameters()]
        networks = (self.generator, self.discriminator)
        fused = device.type == "cuda"
        self.optimizers = [torch.optim.Adam(n.parameters(), lr=2e-4, betas=(0.0, 0.9), fused=fused) for n in networks]
        self.real = (torch.rand(options.batch, CHANNELS, SIDE_PX, SIDE_PX, device=device) * 2 - 1).contiguous(
            memory_format=torch.channels_last
        )

    def step(self) -> None:
        """Update the generator, then the discriminator, then the EMA."""
        generator, discriminator = self.generator, self.discriminator
        discriminator.requires_grad_(False)
        with self.autocast():
            fake = generator(torch.randn(self.batch, NOISE, device=self.device))
            loss = F.softplus(discriminator(self.real) - discriminator(fake)).mean()
        self.update(self.optimizers[0], loss)
        discriminator.requires_grad_(True)
        images = torch.cat([self.real, fake.detach()])
        with self.autocast():
            if self.by_autograd:
                images.requires_grad_(True)
                scores: Any = discriminator.forward(images)  # the compiled call cannot be differentiated twice
                (gradient,) = torch.autograd.grad(scores.sum(), images, create_graph=True)
            else:
                scores, gradient = discriminator(images, with_gradients=True)
        real, fakes = scores.chunk(2)
        penalties = gradient.square().sum((1, 2, 3))
        self.update(self.optimizers[1], F.softplus(fakes - real).mean() + 0.05 * penalties.mean())
        with torch.no_grad():
            weight = 1 - 0.5 ** (self.batch / EMA_HALF_LIFE)
            for average, parameter in zip(self.ema, generator.parameters(), strict=True):
                average.lerp_(parameter, weight)

    def update(self, optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
        """Compute the gradients of a loss and update the weights."""
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    def autocast(self) -> torch.autocast:
        """Return the context for forward passes: bf16 on a GPU."""
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda")


@torch.no_grad()
def count_flops(loop: PlainLoop) -> float:
    """Return the floating-point operations of one step per image; a multiplication and an addition count as two.

    The generator runs forward and backward (3 times its forward operations). To train it, the discriminator runs
    forward on both images and backward to the fake one (3 times). To train the discriminator, it runs forward and
    backward to both images; the second backward pass costs twice as much as these two together (2 · 6 times).
    """

    def forward(network: nn.Module, *inputs: Tensor) -> int:
        with FlopCounterMode(display=False) as counter:
            network(*inputs)
        return int(counter.get_total_flops())

    of_generator = forward(loop.generator, torch.randn(loop.batch, NOISE, device=loop.device))
    of_discriminator = forward(loop.discriminator, loop.real)
    return (3 * of_generator + 15 * of_discriminator) / int(loop.batch)


def make_variant(name: str, options: argparse.Namespace, folder: Path, device: torch.device) -> Variant:
    """Return a variant by name."""
    if name.startswith("engine"):
        settings = {
            "data": "npz",
            "data_root": folder / "images.npz",
            "channels": CHANNELS,
            "size": SIDE_PX,
            "nz": NOISE,
            "width": options.width,
            "num_blocks": options.blocks,
            "full_width_px": options.full_width_px,
            "group_size": options.group_size,
            "batch_size": options.batch,
            "conditional": "off",
            "few_images": "allow",
            "ema_half_life": f"{EMA_HALF_LIFE} images",
            "compile": "on" if name.endswith("compiled") else "off",
        }
        return engine_variant(name.replace(", ", "-"), "r3gan", folder, **settings)
    loop = PlainLoop(options, device, name)

    def before() -> None:
        set_torch_defaults()
        torch.backends.cudnn.benchmark = True

    return Variant(name, loop.step, before)


def usable_variants(options: argparse.Namespace, folder: Path, device: torch.device) -> list[Variant]:
    """Return the chosen variants; one that fails, for example in the compiler, is reported and left out."""
    usable = []
    for name in options.variants:
        start = perf_counter()
        try:
            variant = make_variant(name, options, folder, device)
            variant.before()
            for _ in range(2):
                variant.step()
            synchronize(device)
        except Exception as error:  # a compiler may raise any exception; the other variants are still measured
            reason = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
            print(f"    {name}: not measured ({type(error).__name__}: {reason[:200]})", flush=True)
            continue
        variant.name = name
        usable.append(variant)
        print(f"    {name}: ready after {perf_counter() - start:.1f} s", flush=True)
    return usable


def main() -> None:
    """Measure all batch sizes, print a table for each and write the results as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", default="64,256", help="comma-separated batch sizes")
    parser.add_argument("--width", type=int, default=512, help="channels, as in the preset cifar10")
    parser.add_argument("--blocks", type=int, default=2, help="residual blocks per resolution")
    parser.add_argument("--full-width-px", type=int, default=8, help="side above which there are fewer channels")
    parser.add_argument("--group-size", type=int, default=16, help="channels per group of the 3×3 convolutions")
    parser.add_argument("--variants", default=";".join(VARIANTS), help="variants, separated by semicolons")
    parser.add_argument("--peak", type=float, default=790.0, help="peak speed of the device in TFLOP/s")
    parser.add_argument("--seconds", type=float, default=1.0, help="length of a block")
    parser.add_argument("--repeats", type=int, default=4, help="number of blocks per variant")
    parser.add_argument("--tiny", action="store_true", help="small networks and batches, to test the script on a CPU")
    parser.add_argument("--json", default="", help="JSON file for the results, with versions and hardware")
    options = parser.parse_args()
    options.variants = options.variants.split(";")
    if options.tiny:
        options.batches, options.width, options.blocks, options.seconds, options.repeats = "4", 16, 1, 0.2, 2
        options.variants = [name for name in options.variants if not name.endswith("compiled")]
    warnings.filterwarnings("ignore")
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    results: dict[str, Any] = {}
    for batch in map(int, options.batches.split(",")):
        options.batch = batch
        title = f"r3gan, {SIDE_PX} px, width {options.width}, batch {batch}, {device.type}"
        print(title, flush=True)
        with tempfile.TemporaryDirectory() as folder:
            write_images(Path(folder) / "images.npz")
            flops = count_flops(PlainLoop(options, device, "plain"))
            on_turn = reporter(results, title, flops, options)
            variants = usable_variants(options, Path(folder), device)
            rows = measure_interleaved(variants, batch, options.seconds, options.repeats, device, on_turn)
        print_rows(title, rows)
        for row in results[title]["rows"]:
            speed, share = row["tflops_per_second"], row["share_of_peak"]
            print(f"  {row['variant']:34} {speed:10.1f} TFLOP/s, {share:.1%} of {options.peak:g}", flush=True)


def reporter(
    results: dict[str, Any], title: str, flops: float, options: argparse.Namespace
) -> Callable[[list[dict[str, Any]]], None]:
    """Return a function that adds the speed in TFLOP/s to rows and writes all results."""

    def report(rows: list[dict[str, Any]]) -> None:
        for row in rows:
            row["tflops_per_second"] = row["images_per_second"] * flops / 1e12
            row["share_of_peak"] = row["tflops_per_second"] / options.peak
        results[title] = {"gflops_per_image": flops / 1e9, "rows": rows}
        write_results(options.json, options, batches=results)

    return report


def write_images(path: Path) -> None:
    """Write random images in the layout of the source npz."""
    generator = np.random.default_rng(0)
    images = generator.integers(256, size=(NUM_IMAGES, SIDE_PX, SIDE_PX, CHANNELS), dtype=np.uint8)
    labels = np.arange(NUM_IMAGES) % 10
    np.savez(path, x_train=images, y_train=labels, x_test=images[:64], y_test=labels[:64])


if __name__ == "__main__":
    main()
