"""Measure how long FID takes for images on the device, compared with torchmetrics using the same feature network.

Each variant receives the real and the generated uint8 images in batches of the same size and computes the distance.
torchmetrics' FrechetInceptionDistance runs the TorchScript file unchanged, after Paceline has resized the images,
because torchmetrics cannot resize images as the file expects. torchmetrics and Paceline run in fp32 and, on a GPU, in
tf32. Paceline also runs in fp16, and with cached statistics of the real images, as in training. Repeated measurements
are interleaved. One-time work (loading kernels, profiling the TorchScript network) is done before the measurement.

    PYTHONPATH=src python benchmarks/fid_speed.py --inception default_1.pt --json fid_speed.json
    PYTHONPATH=src python benchmarks/fid_speed.py --images 300 --repeats 2      # an untrained small network, on a CPU
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from time import perf_counter
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from _variants import spread, synchronize, write_results
from torch import Tensor, nn
from torchmetrics.image.fid import FrechetInceptionDistance

from paceline.core.gpu import float32_products
from paceline.evaluation.features import NUM_FEATURES, Arithmetic, FeatureNetwork, Features, load_inception
from paceline.evaluation.inception import enlarged, load_script
from paceline.evaluation.statistics import FeatureSums, Layout, Statistics, frechet_distance, statistics_from

BATCH = 500  # images per batch, for all variants
SIDE_PX = 32


class Untrained(FeatureNetwork):
    """A small network with random weights, to test this script without an Inception file."""

    label, num_features = "untrained", 64

    def __init__(self, device: torch.device) -> None:
        torch.manual_seed(0)
        layers = [nn.Conv2d(3, 16, 3, 2), nn.ReLU(), nn.Conv2d(16, 64, 3, 2), nn.ReLU(), nn.AdaptiveAvgPool2d(1)]
        self.network = nn.Sequential(*layers, nn.Flatten()).to(device)

    def extract(self, images: Tensor, arithmetic: Arithmetic = "fp32") -> Features:
        return Features(self.network(images.float() / 127.5 - 1))


class UntrainedModule(nn.Module):
    """The untrained network as a module for torchmetrics."""

    def __init__(self, network: FeatureNetwork) -> None:
        super().__init__()
        self.num_features, self.extract = network.num_features, network.extract

    def forward(self, images: Tensor) -> Tensor:
        return self.extract(images).vectors


class ScriptModule(nn.Module):
    """Resizes images and passes them to the TorchScript file."""

    num_features = NUM_FEATURES

    def __init__(self, path: str, device: torch.device) -> None:
        super().__init__()
        self.network = load_script(path, device)

    def forward(self, images: Tensor) -> Tensor:
        features: Tensor = self.network(enlarged(images))
        return features


def statistics(network: FeatureNetwork, images: Tensor, arithmetic: Arithmetic) -> Statistics:
    """Return the mean and covariance of the features, computed as in an evaluation."""
    layout = Layout(len(images), network.num_features, network.num_classes, min(10_000, len(images)))
    sums, position = FeatureSums(layout, images.device), 0
    for part in images.split(BATCH):
        sums.add(network(part, arithmetic), torch.arange(position, position + len(part), device=images.device))
        position += len(part)
    return statistics_from(sums.split(sums.flat()))


@torch.no_grad()
def ours(network: FeatureNetwork, real: Statistics | Tensor, made: Tensor, arithmetic: Arithmetic) -> float:
    """Return the FID computed by Paceline; `real` contains images or their statistics."""
    known = real if isinstance(real, Statistics) else statistics(network, real, arithmetic)
    other = statistics(network, made, arithmetic)
    return frechet_distance(known.mean, known.covariance, other.mean, other.covariance)


@torch.no_grad()
def theirs(network: nn.Module, real: Tensor, made: Tensor, arithmetic: Arithmetic) -> float:
    """Return the FID computed by torchmetrics."""
    with float32_products(tf32=arithmetic == "tf32"):
        metric = FrechetInceptionDistance(feature=network).to(real.device)
        for images, is_real in ((real, True), (made, False)):
            for part in images.split(BATCH):
                metric.update(part, real=is_real)
        return float(metric.compute())


def random_images(count: int, seed: int, device: torch.device, *, blur: float = 0.0) -> Tensor:
    """Return images of random squares; blurred images have an FID similar to that of a trained GAN."""
    generator = torch.Generator().manual_seed(seed)
    small = torch.rand(count, 3, SIDE_PX // 4, SIDE_PX // 4, generator=generator)
    images = 255 * small.repeat_interleave(4, 2).repeat_interleave(4, 3)
    around = F.avg_pool2d(F.pad(images, (1, 1, 1, 1), mode="replicate"), 3, stride=1)
    return images.lerp(around, blur).to(device, torch.uint8)


@torch.no_grad()
def warm_up(network: FeatureNetwork, scripted: nn.Module, images: Tensor, arithmetics: list[Arithmetic]) -> None:
    """Do one-time work: load and select kernels, profile the TorchScript network, initialise the solvers."""
    small = torch.eye(16, dtype=torch.float64, device=images.device)
    for arithmetic in arithmetics:
        for part in images.split(BATCH)[:3]:
            network(part, arithmetic)
            if arithmetic != "fp16":
                with float32_products(tf32=arithmetic == "tf32"):
                    scripted(part)
    torch.linalg.eigvals(small)
    frechet_distance(small[0], small, small[0], small)


def parse_repeats(text: str) -> dict[str, int]:
    """Parse the repetitions per variant: `1,fp16=3` means 3 for variants with fp16 in their name, else 1."""
    first, *others = text.split(",")
    special = {part: int(count) for part, _, count in (other.partition("=") for other in others)}
    return special | {"": int(first)}


def summarise(seconds: dict[str, list[float]], distances: dict[str, float]) -> list[dict[str, Any]]:
    """Return one row per measured variant, with its speedup over the first variant and the difference in FID."""
    first = next(iter(seconds))
    return [
        {
            "variant": name,
            "seconds": float(np.median(found)),
            **spread(found),
            "fid": distances[name],
            "difference": distances[name] - distances[first],
            "speedup_over_first": float(np.median(seconds[first]) / np.median(found)),
        }
        for name, found in seconds.items()
        if found
    ]


def main() -> None:
    """Measure all variants in turn, print a table and write the results as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inception", default="", help="the TorchScript file (default: a small untrained network)")
    parser.add_argument("--inception-sha256", default="", help="SHA-256 of the file, if it is not a known one")
    parser.add_argument("--images", type=int, default=50_000, help="number of real images and of generated images")
    parser.add_argument(
        "--repeats",
        type=parse_repeats,
        default="1,fp16=3",
        help="measurements per variant, then exceptions by a word in the variant's name; 0 skips a variant, "
        "except the first (default: %(default)s)",
    )
    parser.add_argument("--json", default="", help="JSON file for the results, with versions and hardware")
    options = parser.parse_args()
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    network: FeatureNetwork = Untrained(device)
    scripted: nn.Module = UntrainedModule(network)
    if options.inception:
        network = load_inception(options.inception, options.inception_sha256, device)
        scripted = ScriptModule(options.inception, device)
    both: list[Arithmetic] = ["fp32", "tf32"] if device.type == "cuda" else ["fp32"]
    ours_in = [*both, "fp16"] if device.type == "cuda" and "fp16" in network.arithmetics else both
    real, made = random_images(options.images, 0, device), random_images(options.images, 1, device, blur=0.6)
    warm_up(network, scripted, real, ours_in)
    with torch.no_grad():
        cached = statistics(network, real, ours_in[-1])
    variants: dict[str, Callable[[], float]] = {
        **{f"torchmetrics, {arithmetic}": partial(theirs, scripted, real, made, arithmetic) for arithmetic in both},
        **{f"ours, {arithmetic}": partial(ours, network, real, made, arithmetic) for arithmetic in ours_in},
        f"ours, {ours_in[-1]}, cached statistics": partial(ours, network, cached, made, ours_in[-1]),
    }
    first = next(iter(variants))
    repeats = {name: next(count for part, count in options.repeats.items() if part in name) for name in variants}
    turns = repeats | {first: max(1, repeats[first])}
    seconds: dict[str, list[float]] = {name: [] for name in variants if turns[name]}
    distances: dict[str, float] = {}
    print(f"FID, {options.images:,} images each, {SIDE_PX} px, {network.label or 'Inception'}, {device}")
    for turn in range(max(turns.values())):
        names = [name for name in seconds if turn < turns[name]]
        for name in names if turn % 2 == 0 else reversed(names):
            synchronize(device)
            start = perf_counter()
            distances[name] = variants[name]()
            synchronize(device)
            seconds[name].append(perf_counter() - start)
            write_results(options.json, options, network=network.protocol(), rows=summarise(seconds, distances))
    print(f"  {'variant':30} {'seconds':>8}  {'low':>7} – {'high':>7}   n  {'FID':>9}  {'ΔFID':>9}  speedup")
    for row in summarise(seconds, distances):
        print(
            f"  {row['variant']:30} {row['seconds']:8.2f}  {row['low']:7.2f} – {row['high']:7.2f} {row['n']:3}  "
            f"{row['fid']:9.4f}  {row['difference']:9.1e}  {row['speedup_over_first']:.2f}"
        )


if __name__ == "__main__":
    main()
