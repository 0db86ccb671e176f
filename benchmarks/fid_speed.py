"""How long FID takes on pictures that lie on the device, beside torchmetrics' class with the same feature network.

Each side sees the real and the made pictures, as uint8, in batches of the same size, and gives the distance.
torchmetrics' FrechetInceptionDistance runs the TorchScript file as it is; its pictures are enlarged by our function,
for it has none that fits the file. Both sides run in fp32 and, on a GPU, in tf32; ours in fp16 too, and once more with
the real pictures' statistics kept from before, as a run has them. Sides that run more than once take turns; what a side
does only the first time (loading kernels, profiling the script) is done before the clock starts.

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
from _sides import keep_json, spread, wait_for
from torch import Tensor, nn
from torchmetrics.image.fid import FrechetInceptionDistance

from paceline.evaluation.features.inception import NUM_FEATURES, enlarged, load_inception, load_script
from paceline.evaluation.features.network import Arithmetic, FeatureNetwork, Features, computing_in
from paceline.evaluation.statistics import frechet_distance
from paceline.evaluation.sums import FeatureSums, Layout, Statistics, statistics_from, unflatten

BATCH = 500  # pictures in an evaluation batch, for all sides
SIDE_PX = 32


class Untrained(FeatureNetwork):
    """A small network with random weights, to try the script without a file."""

    label, num_features = "untrained", 64

    def __init__(self, device: torch.device) -> None:
        torch.manual_seed(0)
        layers = [nn.Conv2d(3, 16, 3, 2), nn.ReLU(), nn.Conv2d(16, 64, 3, 2), nn.ReLU(), nn.AdaptiveAvgPool2d(1)]
        self.network = nn.Sequential(*layers, nn.Flatten()).to(device)

    def extract(self, images: Tensor, arithmetic: Arithmetic = "fp32") -> Features:
        return Features(self.network(images.float() / 127.5 - 1))


class AsModule(nn.Module):
    """The untrained network as torchmetrics takes one."""

    def __init__(self, network: FeatureNetwork) -> None:
        super().__init__()
        self.num_features, self.see = network.num_features, network.see

    def forward(self, pictures: Tensor) -> Tensor:
        return self.extract(pictures).vectors


class File(nn.Module):
    """The TorchScript file, with nothing but the preparation of pictures before it."""

    num_features = NUM_FEATURES

    def __init__(self, path: str, device: torch.device) -> None:
        super().__init__()
        self.network = load_script(path, device)

    def forward(self, pictures: Tensor) -> Tensor:
        return self.network(enlarged(pictures))


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
def theirs(network: nn.Module, real: Tensor, made: Tensor, arithmetic: Arithmetic) -> float:
    """torchmetrics' distance."""
    with computing_in(arithmetic):
        metric = FrechetInceptionDistance(feature=network).to(real.device)
        for pictures, is_real in ((real, True), (made, False)):
            for some in pictures.split(BATCH):
                metric.update(some, real=is_real)
        return float(metric.compute())


def pictures_of(count: int, seed: int, device: torch.device, *, blurred: float = 0.0) -> Tensor:
    """Random pictures of squares; blurring them moves their distance from sharp ones to where a trained GAN's is."""
    generator = torch.Generator().manual_seed(seed)
    small = torch.rand(count, 3, SIDE_PX // 4, SIDE_PX // 4, generator=generator)
    pictures = 255 * small.repeat_interleave(4, 2).repeat_interleave(4, 3)
    around = F.avg_pool2d(F.pad(pictures, (1, 1, 1, 1), mode="replicate"), 3, stride=1)
    return pictures.lerp(around, blurred).to(device, torch.uint8)


@torch.no_grad()
def warm_up(network: FeatureNetwork, scripted: nn.Module, pictures: Tensor, arithmetics: list[Arithmetic]) -> None:
    """What happens only once: kernels are loaded and chosen, the script is profiled, the solvers start."""
    small = torch.eye(16, dtype=torch.float64, device=pictures.device)
    for arithmetic in arithmetics:
        for some in pictures.split(BATCH)[:3]:
            network(some, arithmetic)
            if arithmetic != "fp16":
                with computing_in(arithmetic):
                    scripted(some)
    torch.linalg.eigvals(small)
    frechet_distance(small[0], small, small[0], small)


def repeats_from(text: str) -> dict[str, int]:
    """How often a side is measured, by a part of its name: `1,fp16=3` is once, but three times in fp16."""
    first, *others = text.split(",")
    special = {part: int(count) for part, _, count in (other.partition("=") for other in others)}
    return special | {"": int(first)}


def summarise(seconds: dict[str, list[float]], distances: dict[str, float]) -> list[dict[str, Any]]:
    """A row for each side that was measured, compared with the first."""
    first = next(iter(seconds))
    return [
        {
            "side": name,
            "seconds": float(np.median(found)),
            **spread(found),
            "fid": distances[name],
            "difference": distances[name] - distances[first],
            "times_the_first": float(np.median(seconds[first]) / np.median(found)),
        }
        for name, found in seconds.items()
        if found
    ]


def main() -> None:
    """Measures all sides in turns, prints a table and writes it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inception", default="", help="the TorchScript file (default: a small untrained network)")
    parser.add_argument("--inception-sha256", default="", help="of a file that is not known here")
    parser.add_argument("--images", type=int, default=50_000, help="of each kind")
    parser.add_argument(
        "--repeats",
        type=repeats_from,
        default="1,fp16=3",
        help="how often each side is measured, then other numbers for sides with a word in their name; 0 leaves a "
        "side out, but for the first (default: %(default)s)",
    )
    parser.add_argument("--json", default="", help="file for the numbers, with versions and hardware")
    options = parser.parse_args()
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    network: FeatureNetwork = Untrained(device)
    scripted: nn.Module = AsModule(network)
    if options.inception:
        network = load_inception(options.inception, options.inception_sha256, device)
        scripted = File(options.inception, device)
    both: list[Arithmetic] = ["fp32", "tf32"] if device.type == "cuda" else ["fp32"]
    ours_in = [*both, "fp16"] if device.type == "cuda" and "fp16" in network.arithmetics else both
    real, made = pictures_of(options.images, 0, device), pictures_of(options.images, 1, device, blurred=0.6)
    warm_up(network, scripted, real, ours_in)
    with torch.no_grad():
        kept = statistics(network, real, ours_in[-1])
    sides: dict[str, Callable[[], float]] = {
        **{f"torchmetrics, {arithmetic}": partial(theirs, scripted, real, made, arithmetic) for arithmetic in both},
        **{f"ours, {arithmetic}": partial(ours, network, real, made, arithmetic) for arithmetic in ours_in},
        f"ours, {ours_in[-1]}, real ones kept": partial(ours, network, kept, made, ours_in[-1]),
    }
    first = next(iter(sides))
    repeats = {name: next(count for part, count in options.repeats.items() if part in name) for name in sides}
    turns = repeats | {first: max(1, repeats[first])}
    seconds: dict[str, list[float]] = {name: [] for name in sides if turns[name]}
    distances: dict[str, float] = {}
    print(f"FID of {options.images:,} pictures against as many, {SIDE_PX} px, {network.label or 'Inception'}, {device}")
    for turn in range(max(turns.values())):
        taking = [name for name in seconds if turn < turns[name]]
        for name in taking if turn % 2 == 0 else reversed(taking):
            wait_for(device)
            start = perf_counter()
            distances[name] = sides[name]()
            wait_for(device)
            seconds[name].append(perf_counter() - start)
            keep_json(options.json, options, network=network.protocol(), rows=summarise(seconds, distances))
    print(f"  {'side':28} {'seconds':>8}  {'low':>7} – {'high':>7}   n  {'FID':>9}  {'ΔFID':>9}  times the first")
    for row in summarise(seconds, distances):
        print(
            f"  {row['side']:28} {row['seconds']:8.2f}  {row['low']:7.2f} – {row['high']:7.2f} {row['n']:3}  "
            f"{row['fid']:9.4f}  {row['difference']:9.1e}  {row['times_the_first']:.2f}"
        )


if __name__ == "__main__":
    main()
