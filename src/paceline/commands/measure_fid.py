"""FID in `paceline measure`: over all images of both folders, whether or not their names match."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from paceline.core.activity import activity, counted
from paceline.core.errors import UserError
from paceline.evaluation.features.inception import load_inception
from paceline.evaluation.features.network import FeatureNetwork
from paceline.evaluation.protocol import Protocol
from paceline.evaluation.statistics import frechet_distance
from paceline.evaluation.sums import FeatureSums, Layout, Statistics, statistics_from, unflatten
from paceline.images.decode import BadImage, decode
from paceline.images.planes import UnusablePlanes, read_planes_header
from paceline.images.regions.open_image import is_huge
from paceline.images.size_limit import PIXEL_LIMIT

CPU = torch.device("cpu")
FEWEST = 2  # a covariance needs two images
MEGAPIXELS = PIXEL_LIMIT // 10**6


@dataclass(frozen=True)
class FidImages:
    """The images of both folders that FID compares, and the network that computes their features."""

    network: FeatureNetwork
    results: tuple[Path, ...]
    targets: tuple[Path, ...]
    num_huge: int  # images that are left out because of their size


@dataclass(frozen=True)
class MeasuredFid:
    """The FID, how it was measured, notes about it, and the files that could not be read."""

    metrics: dict[str, float]
    protocol: Protocol
    notes: tuple[str, ...]
    problems: tuple[str, ...]


def choose_fid_images(results: Sequence[Path], targets: Sequence[Path], inception: str, sha256: str) -> FidImages:
    """Load the network and return it with the images to compare; raise UserError if there are too few images."""
    activity("loading the Inception network")
    network = load_inception(inception, sha256, CPU)
    made, real = _usable("result", results), _usable("target", targets)
    num_huge = len(results) + len(targets) - len(made) - len(real)
    return FidImages(network, made, real, num_huge)


def _usable(kind: str, files: Sequence[Path]) -> tuple[Path, ...]:
    """Return the files that are not too large; raise UserError if they are too few or have other channels."""
    small = tuple(file for file in files if not is_huge(file))
    _check_number(kind, len(small))
    for file in small:
        _check_channels(file)
    return small


def measure_fid(images: FidImages) -> MeasuredFid:
    """Return the FID between all results and all targets, computed as in `evaluate`."""
    problems: list[str] = []
    network = images.network
    made = _statistics("result", images.results, network, problems)
    real = _statistics("target", images.targets, network, problems)
    counts = [int(one.count.item()) for one in (made, real)]
    shown = f"{counts[0]:,} results, {counts[1]:,} targets"
    notes = [note] if (note := network.few_images_note(min(counts), f"{min(counts):,} images ({shown})")) else []
    if images.num_huge:
        total = images.num_huge + len(images.results) + len(images.targets)
        notes.append(f"FID: left out {images.num_huge} of {total} images, which have more than {MEGAPIXELS} megapixels")
    activity("computing FID from the features")
    return MeasuredFid(
        {"FID": frechet_distance(real.mean, real.covariance, made.mean, made.covariance)},
        {**network.protocol(), "FID images": shown},
        tuple(notes),
        tuple(problems),
    )


def _statistics(kind: str, files: Sequence[Path], network: FeatureNetwork, problems: list[str]) -> Statistics:
    """Return the statistics of the features of images; add files that cannot be decoded to `problems`."""
    sums = FeatureSums(Layout(len(files), network.num_features, network.num_classes, FEWEST), CPU)
    num_used = 0
    for file in counted(files, f"computing features of {kind}s for FID", len(files)):
        try:
            levels = torch.from_numpy(np.array(decode(file).convert("RGB"))).permute(2, 0, 1)[None]
        except BadImage as error:
            problems.append(f"{file}: {error}")
            continue
        sums.add(network(levels, "fp32"), torch.tensor([num_used]))
        num_used += 1
    _check_number(kind, num_used)
    return statistics_from(unflatten(sums.flat(), sums.layout))


def _check_number(kind: str, number: int) -> None:
    if number < FEWEST:
        limit = f"of up to {MEGAPIXELS} megapixels"
        raise UserError(
            f"--inception: FID needs at least {FEWEST} {kind}s {limit}, got {number}; add images, or omit --inception"
        )


def _check_channels(file: Path) -> None:
    """Raise UserError for a file that is not read as a grey or RGB image of 8 bits."""
    try:
        header = read_planes_header(file)
    except UnusablePlanes:
        return  # the first page may be a grey or RGB image
    except BadImage:
        return  # reported when the file is decoded
    if header and (header.is_stack or header.dtype.kind == "f"):
        raise UserError(f"--inception: FID needs 8-bit images with 1 or 3 channels, unlike {file}; omit --inception")
