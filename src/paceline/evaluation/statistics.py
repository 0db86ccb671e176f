"""Statistics of features: sums over samples, the metrics computed from them, and a cache for those of real images."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import sha256
from math import prod
from pathlib import Path
from typing import NamedTuple

import numpy as np
import safetensors.torch
import torch
from torch import Tensor

from paceline.core.errors import UserError
from paceline.core.files import (
    SAFETENSORS,
    checksum_of_content,
    read_json,
    user_cache,
    write_file,
    write_json,
)
from paceline.data.source import LABEL, Source
from paceline.evaluation.features import Features
from paceline.evaluation.protocol import Protocol

KERNEL_SUBSET = 1000  # rows per estimate of the kernel distance
NEIGHBOURS = 3  # for precision and recall
DENSITY_NEIGHBOURS = 5  # for density and coverage
_ROWS_AT_ONCE = 2000  # rows of a distance matrix computed at a time


def frechet_distance(mean1: Tensor, covariance1: Tensor, mean2: Tensor, covariance2: Tensor) -> float:
    """Return the Fréchet distance between two normal distributions, in float64.

    The trace of (Σ₁Σ₂)^½ is the sum of the square roots of the eigenvalues of RᵀΣ₂R, where RRᵀ = Σ₁. This matrix is
    symmetric, so no general matrix square root is needed. Covariances may be singular (fewer samples than features).
    If the features are not finite, the distance is NaN.
    """
    if not (covariance1.isfinite().all() and covariance2.isfinite().all()):
        return math.nan  # the decompositions below raise an error for a matrix with NaN
    root = _root(covariance1.double())
    product = root.T @ covariance2.double() @ root
    eigenvalues: Tensor = torch.linalg.eigvalsh((product + product.T) / 2)
    trace_of_root = eigenvalues.clamp_min(0).sqrt().sum()
    traces = covariance1.double().trace() + covariance2.double().trace()
    distance = (mean1.double() - mean2.double()).square().sum() + traces - 2 * trace_of_root
    return max(float(distance.item()), 0.0)  # with the arguments in this order, max() returns a NaN unchanged


def _root(covariance: Tensor) -> Tensor:
    """Return R with RRᵀ = covariance: the Cholesky factor or, for a singular matrix, one computed from eigenvalues."""
    factor: Tensor
    failed: Tensor
    factor, failed = torch.linalg.cholesky_ex(covariance)
    if not failed:
        return factor
    values: Tensor
    vectors: Tensor
    values, vectors = torch.linalg.eigh(covariance)
    return vectors * values.clamp_min(0).sqrt()


def kernel_distance(first: Tensor, second: Tensor, subset: int = KERNEL_SUBSET) -> float:
    """Return the unbiased squared MMD (maximum mean discrepancy) with kernel (x·y/d + 1)³, averaged over subsets."""
    size = min(subset, len(first), len(second))
    estimates = [
        _squared_discrepancy(one.double(), other.double())
        for one, other in zip(torch.split(first, size), torch.split(second, size), strict=False)
        if len(one) == len(other) == size
    ]
    return torch.stack(estimates).mean().item()


def _squared_discrepancy(first: Tensor, second: Tensor) -> Tensor:
    def kernel(a: Tensor, b: Tensor) -> Tensor:
        return (a @ b.T / a.shape[1] + 1) ** 3

    def mean_of_others(table: Tensor) -> Tensor:
        return (table.sum() - table.trace()) / (len(table) * (len(table) - 1))

    within = mean_of_others(kernel(first, first)) + mean_of_others(kernel(second, second))
    return within - 2 * kernel(first, second).mean()


def precision_and_recall(real: Tensor, made: Tensor) -> tuple[float, float]:
    """Return the fraction of generated rows that lie among the real ones, and vice versa.

    As in Kynkäänniemi et al. (2019), a row lies among others if its distance to one of them is at most the distance
    between that one and its third-nearest neighbour.
    """
    count = min(len(real), len(made))
    real, made = real[:count].double(), made[:count].double()
    return _share_among(made, real), _share_among(real, made)


def density_and_coverage(real: Tensor, made: Tensor) -> tuple[float, float]:
    """Return how many real neighbourhoods contain a generated row, relative to k, and the share that contain any.

    As in Naeem et al. (2020), the neighbourhood of a real row contains all rows nearer than its k-th nearest real
    neighbour, so that the density of the real rows themselves is 1.
    """
    count = min(len(real), len(made))
    real, made = real[:count].double(), made[:count].double()
    radii = _radii(real, DENSITY_NEIGHBOURS)
    around = torch.zeros(count, dtype=torch.float64, device=real.device)  # generated rows around each real row
    for table in _squared_distances(made, real):
        around += (table < radii).sum(dim=0)
    return around.sum().item() / (DENSITY_NEIGHBOURS * count), (around > 0).double().mean().item()


def _share_among(rows: Tensor, others: Tensor) -> float:
    radii = _radii(others, NEIGHBOURS)
    inside = [(table <= radii).any(dim=1) for table in _squared_distances(rows, others)]
    return torch.cat(inside).double().mean().item()


def _radii(rows: Tensor, neighbours: int) -> Tensor:
    """Return the squared distance from each row to its k-th nearest neighbour."""
    nearest = min(neighbours + 1, len(rows))  # plus one, because the nearest row is the row itself
    return torch.cat([table.kthvalue(nearest, dim=1).values for table in _squared_distances(rows, rows)])


def _squared_distances(rows: Tensor, others: Tensor) -> Iterator[Tensor]:
    for some in torch.split(rows, _ROWS_AT_ONCE):
        squares = some.square().sum(dim=1)[:, None] + others.square().sum(dim=1)
        yield (squares - 2 * some @ others.T).clamp_min(0)


def inception_score(counts: Tensor, likelihoods: Tensor, negative_entropies: Tensor) -> float:
    """Return exp of the mean divergence between p(class | image) and p(class), averaged across splits of the images.

    For each split, the arguments contain the number of images, the sum of their class probabilities, and the sum of
    Σ p log p.
    """
    filled = counts > 0
    counts, likelihoods, negative_entropies = counts[filled], likelihoods[filled], negative_entropies[filled]
    overall = likelihoods / counts[:, None]
    entropies: Tensor = torch.special.xlogy(overall, overall).sum(dim=1)
    return (negative_entropies / counts - entropies).exp().mean().item()


NUM_SPLITS = 10  # groups of images for the Inception Score


MAX_BYTES = 4 * 2**30  # of the sums of products by class, which need num_labels · num_features² numbers
CLASS_FID = "FID:"  # followed by the name of the class
MIN_IMAGES = 2  # a covariance needs at least two images


class Layout(NamedTuple):
    """The numbers of samples, features and classes, which determine the shapes of the sums."""

    total: int  # expected number of samples
    num_features: int
    num_classes: int  # number of logits; 0 if there are none
    num_rows: int  # number of samples, counted from the first, whose features are kept
    num_labels: int = 0  # number of classes whose features are also summed separately

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the sums by name, in order."""
        shapes: dict[str, tuple[int, ...]] = {
            "count": (1,),
            "sum": (self.num_features,),
            "products": (self.num_features, self.num_features),
            "rows": (self.num_rows, self.num_features),
            "split_counts": (NUM_SPLITS,),
            "likelihoods": (NUM_SPLITS, self.num_classes),
            "negative_entropies": (NUM_SPLITS,),
        }
        by_class = {f"class_{name}": (self.num_labels, *shapes[name]) for name in ("count", "sum", "products")}
        return shapes | by_class if self.num_labels else shapes


class FeatureSums:
    """Sums features in float64. Samples are identified by position, so sums do not depend on the number of ranks."""

    def __init__(self, layout: Layout, device: torch.device) -> None:
        if 8 * layout.num_labels * layout.num_features**2 > MAX_BYTES:
            raise UserError(
                f"per_class=on: too many classes ({layout.num_labels:,}) for {layout.num_features:,} features; "
                "use per_class=off"
            )
        self.layout = layout
        self.parts = {
            name: torch.zeros(shape, dtype=torch.float64, device=device) for name, shape in layout.shapes().items()
        }
        # The extra row receives all samples that are not kept, so that the host need not wait for the device.
        self.rows = torch.zeros(layout.num_rows + 1, layout.num_features, dtype=torch.float64, device=device)

    def add(self, features: Features, position: Tensor, label: Tensor | None = None) -> None:
        """Add a batch. The position of a sample is its index among all samples."""
        vectors, parts = features.vectors.double(), self.parts
        parts["count"] += len(vectors)
        parts["sum"] += vectors.sum(dim=0)
        parts["products"] += vectors.T @ vectors
        self.rows.index_copy_(0, position.clamp_max(self.layout.num_rows), vectors)
        if features.logits is not None:
            likelihood = features.logits.double().softmax(dim=1)
            splits = torch.arange(NUM_SPLITS, device=position.device)
            member = (splits[:, None] == position * NUM_SPLITS // self.layout.total).double()
            parts["split_counts"] += member.sum(dim=1)
            parts["likelihoods"] += member @ likelihood
            parts["negative_entropies"] += member @ torch.special.xlogy(likelihood, likelihood).sum(dim=1)
        for number in range(self.layout.num_labels):  # in turn, so that the host need not wait for the device
            assert label is not None
            is_member = label == number
            chosen = vectors * is_member[:, None]
            parts["class_count"][number] += is_member.sum()
            parts["class_sum"][number] += chosen.sum(0)
            parts["class_products"][number] += chosen.T @ vectors

    def flat(self) -> Tensor:
        """Return all sums as one vector."""
        return torch.cat([part.flatten() for part in (self.parts | {"rows": self.rows[:-1]}).values()])

    def split(self, flat: Tensor) -> dict[str, Tensor]:
        """Split a vector like that of `flat` into sums by name."""
        shapes = self.layout.shapes()
        pieces = torch.split(flat, [prod(shape) for shape in shapes.values()])
        return {name: piece.view(shape) for (name, shape), piece in zip(shapes.items(), pieces, strict=True)}


@dataclass(frozen=True)
class Statistics:
    """Statistics of features, from which distances are computed."""

    count: Tensor  # shape [1]
    mean: Tensor
    covariance: Tensor
    rows: Tensor  # the features of the first samples


def statistics_from(sums: dict[str, Tensor]) -> Statistics:
    """Compute the statistics from the sums, with an unbiased covariance."""
    count = sums["count"]
    mean = sums["sum"] / count
    covariance = (sums["products"] - count * mean[:, None] * mean) / (count - 1)
    return Statistics(count, mean, covariance, sums["rows"])


def class_statistics_from(sums: dict[str, Tensor]) -> list[Statistics]:
    """Compute the statistics of each class without rows; they are not finite for fewer than `MIN_IMAGES` images."""
    counts, products = sums["class_count"], sums["class_products"]
    means = sums["class_sum"] / counts
    covariances = (products - counts[..., None] * means[:, :, None] * means[:, None]) / (counts - 1)[..., None]
    return [Statistics(*values, rows=means[:0]) for values in zip(counts, means, covariances, strict=True)]


def distances_by_class(
    real: Sequence[Statistics], made: Sequence[Statistics], names: Sequence[str]
) -> tuple[dict[str, float], list[str]]:
    """Return the FID of each class with at least `MIN_IMAGES` real and generated images, and the other classes.

    The mean over the classes comes first; nothing is returned if no class has enough images.
    """
    distances, missing = {}, []
    for name, of_real, of_made in zip(names, real, made, strict=True):
        if min(of_real.count, of_made.count) < MIN_IMAGES:
            missing.append(name)
        else:
            distance = frechet_distance(of_real.mean, of_real.covariance, of_made.mean, of_made.covariance)
            distances[f"{CLASS_FID}{name}"] = distance
    mean = {"FID_by_class": sum(distances.values()) / len(distances)} if distances else {}
    return mean | distances, missing


_not_stored: dict[Path, Statistics] = {}  # the last statistics that could not be written, for this process only


def cache_folder() -> Path:
    """Return the folder in which statistics are cached."""
    return user_cache() / "statistics"


def find_statistics(protocol: Protocol, device: torch.device) -> Statistics | None:
    """Return the cached statistics for a protocol; None if they are missing or damaged."""
    path = _path(protocol)
    if path in _not_stored:
        return _not_stored[path]
    try:
        changed_at = path.stat().st_mtime_ns
    except OSError:
        return None
    return _read(path, json.dumps(protocol, sort_keys=True), device, changed_at)


@lru_cache(maxsize=1)  # read once for all evaluations of a run
def _read(path: Path, protocol: str, device: torch.device, changed_at: int) -> Statistics | None:
    try:
        content = path.read_bytes()
    except OSError:
        return None
    manifest = read_json(path.with_suffix(".json"))
    if manifest.get("sha256") != sha256(content).hexdigest() or manifest.get("protocol") != json.loads(protocol):
        return None
    return Statistics(**{name: value.double().to(device) for name, value in safetensors.torch.load(content).items()})


def store_statistics(protocol: Protocol, statistics: Statistics) -> None:
    """Cache statistics for later evaluations: in a file or, if the folder is not writable, in this process."""
    path = _path(protocol)
    tensors = {name: value.cpu().contiguous() for name, value in vars(statistics).items()}
    tensors["rows"] = tensors["rows"].float()  # float32 is the precision of the network's output
    content = safetensors.torch.save(tensors)
    manifest = {"protocol": dict(protocol), "sha256": sha256(content).hexdigest()}
    _not_stored.clear()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_file(path, content, durable=False)
        write_json(path.with_suffix(".json"), manifest, durable=False, indent=1)
    except OSError:
        _not_stored[path] = statistics


def _path(protocol: Protocol) -> Path:
    key = checksum_of_content(protocol)[:32]
    return cache_folder() / f"{key}{SAFETENSORS}"


NUM_PAIRS = 1000  # pairs of neighbouring samples whose classes are compared
ORDER_KEY = 0


def random_positions(source: Source) -> Tensor | None:
    """Return a random position for each sample if samples of a class are neighbours, as in a folder; otherwise None.

    The first samples, or a subset of consecutive ones, would contain only a few of the classes.
    """
    if len(source) < 2 or not _is_grouped(source):
        return None
    return torch.from_numpy(np.random.Generator(np.random.Philox(key=ORDER_KEY)).permutation(len(source)))


def _is_grouped(source: Source) -> bool:
    """Return whether neighbours have the same class much more often than two random samples."""
    first = np.unique(np.linspace(0, len(source) - 2, NUM_PAIRS, dtype=np.int64))
    one, other = source.numbers_of(first), source.numbers_of(first + 1)
    if not one or not other or LABEL not in one:
        return False
    same = float(np.mean(one[LABEL] == other[LABEL]))
    shares = np.bincount(one[LABEL].astype(np.int64)) / len(first)
    by_chance = float(np.square(shares).sum())
    return by_chance < 1 and same > (1 + by_chance) / 2
