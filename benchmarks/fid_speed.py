"""How long FID takes on pictures that lie on the device, beside torchmetrics' class with the same feature network.

Each side sees the real and the made pictures, as uint8, and gives the distance. torchmetrics' FrechetInceptionDistance
runs the same network from the same file, on batches of the same size. Both run in fp32 and, on a GPU, in tf32; ours
once more with the real pictures' statistics kept from before, as a run has them. The sides take turns.

    PYTHONPATH=src python benchmarks/fid_speed.py --inception default_1.pt --json fid_speed.json
    PYTHONPATH=src python benchmarks/fid_speed.py --images 300 --repeats 2      # an untrained small network, on a CPU
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from time import perf_counter

import numpy as np
import torch
from _sides import keep_json, wait_for
from torch import Tensor, nn
from torchmetrics.image.fid import FrechetInceptionDistance

from paceline.evaluation._feature_network import Arithmetic, FeatureNetwork, Seen
from paceline.evaluation._inception import load_inception
from paceline.evaluation._statistics import frechet_distance
from paceline.evaluation._sums import FeatureSums, Layout, Statistics, statistics_from, unflatten

BATCH = 500  # pictures in an evaluation batch, for all sides
SIDE_PX = 32


class Untrained(FeatureNetwork):
    """A small network with random weights, to try the script without a file."""

    label, num_features = "untrained", 64

    def __init__(self, device: torch.device) -> None:
        torch.manual_seed(0)
        layers = [nn.Conv2d(3, 16, 3, 2), nn.ReLU(), nn.Conv2d(16, 64, 3, 2), nn.ReLU(), nn.AdaptiveAvgPool2d(1)]
        self.network = nn.Sequential(*layers, nn.Flatten()).to(device)

    def see(self, pictures: Tensor) -> Seen:
        return Seen(self.network(pictures.float() / 127.5 - 1))


class AsModule(nn.Module):
    """A feature network as torchmetrics takes one."""

    def __init__(self, network: FeatureNetwork, arithmetic: Arithmetic) -> None:
        super().__init__()
        self.num_features = network.num_features
        self.see, self.arithmetic = network, arithmetic

    def forward(self, pictures: Tensor) -> Tensor:
        return self.see(pictures, self.arithmetic).features


def statistics(network: FeatureNetwork, pictures: Tensor, arithmetic: Arithmetic) -> Statistics:
    """Mean and covariance of the features, as the judge of generators adds them up."""
    layout = Layout(len(pictures), network.num_features, network.num_classes, min(10_000, len(pictures)))
    sums, position = FeatureSums(layout, pictures.device), 0
    for some in pictures.split(BATCH):
        sums.add(network(some, arithmetic), torch.arange(position, position + len(some), device=pictures.device))
        position += len(some)
    return statistics_from(unflatten(sums.flat(), layout))


@torch.no_grad()
def ours(network: FeatureNetwork, real: Statistics | Tensor, made: Tensor, arithmetic: Arithmetic) -> float:
    """Our distance, of pictures or with the real ones' statistics."""
    known = real if isinstance(real, Statistics) else statistics(network, real, arithmetic)
    other = statistics(network, made, arithmetic)
    return frechet_distance(known.mean, known.covariance, other.mean, other.covariance)


@torch.no_grad()
def theirs(network: FeatureNetwork, real: Tensor, made: Tensor, arithmetic: Arithmetic) -> float:
    """torchmetrics' distance."""
    metric = FrechetInceptionDistance(feature=AsModule(network, arithmetic)).to(real.device)
    for pictures, is_real in ((real, True), (made, False)):
        for some in pictures.split(BATCH):
            metric.update(some, real=is_real)
    return float(metric.compute())


def pictures_of(count: int, seed: int, device: torch.device) -> Tensor:
    """Smooth random pictures; those of another seed are a little brighter."""
    generator = torch.Generator().manual_seed(seed)
    small = torch.rand(count, 3, SIDE_PX // 4, SIDE_PX // 4, generator=generator) + 0.02 * seed
    return (small.repeat_interleave(4, 2).repeat_interleave(4, 3).clamp(0, 1) * 255).to(device, torch.uint8)


def main() -> None:
    """Measures all sides in turns, prints a table and writes it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inception", default="", help="the TorchScript file (default: a small untrained network)")
    parser.add_argument("--inception-sha256", default="", help="of a file that is not known here")
    parser.add_argument("--images", type=int, default=50_000, help="of each kind")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", default="", help="file for the numbers, with versions and hardware")
    options = parser.parse_args()
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    network: FeatureNetwork = Untrained(device)
    if options.inception:
        network = load_inception(options.inception, options.inception_sha256, device)
    real, made = (pictures_of(options.images, seed, device) for seed in (0, 1))
    with torch.no_grad():
        kept = statistics(network, real, "fp32")
    sides: dict[str, Callable[[], float]] = {
        "torchmetrics, fp32": lambda: theirs(network, real, made, "fp32"),
        "ours, fp32": lambda: ours(network, real, made, "fp32"),
        "ours, fp32, real ones kept": lambda: ours(network, kept, made, "fp32"),
    }
    if device.type == "cuda":
        sides["torchmetrics, tf32"] = lambda: theirs(network, real, made, "tf32")
        sides["ours, tf32"] = lambda: ours(network, real, made, "tf32")
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    distances: dict[str, float] = {}
    for turn in range(options.repeats):
        for name in list(sides) if turn % 2 == 0 else reversed(sides):
            wait_for(device)
            start = perf_counter()
            distances[name] = sides[name]()
            wait_for(device)
            seconds[name].append(perf_counter() - start)
    first = next(iter(sides))
    print(f"FID of {options.images:,} pictures against as many, {SIDE_PX} px, {network.label or 'Inception'}, {device}")
    print(f"  {'side':28} {'seconds':>8}  {'low':>7} – {'high':>7}   n  {'FID':>9}  {'ΔFID':>9}  times the first")
    rows = []
    for name, found in seconds.items():
        ratio = float(np.median(np.array(seconds[first]) / np.array(found)))
        difference = distances[name] - distances[first]
        middle = float(np.median(found))
        print(
            f"  {name:28} {middle:8.2f}  {min(found):7.2f} – {max(found):7.2f} {len(found):3}  "
            f"{distances[name]:9.4f}  {difference:9.1e}  {ratio:.2f}"
        )
        row = {"side": name, "seconds": middle, "low": min(found), "high": max(found), "n": len(found)}
        rows.append(row | {"fid": distances[name], "difference": difference, "times_the_first": ratio})
    keep_json(options.json, options, network=network.protocol(), rows=rows)


if __name__ == "__main__":
    main()
