"""NIQE, an image quality metric that needs no reference image; lower is better.

Mittal, Soundararajan and Bovik, Making a "Completely Blind" Image Quality Analyzer (2013). Statistics of locally
normalised luma in 96×96 blocks, at two scales, are compared with those of undistorted photographs. The authors' model
of such photographs is not included. `niqe.npz` was fitted with `fit` to photographs that ship with Paceline, so values
are comparable with each other, but not with values published elsewhere.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.contracts.pixel_format import LUMA
from paceline.core.errors import UserError
from paceline.images.resample import bicubic

BLOCK_PX = 96
WINDOW, SIGMA = 7, 7 / 6
NEIGHBOURS = ((0, 1), (1, 0), (1, 1), (1, -1))  # offsets between pixels whose products are evaluated
SHARP_SHARE = 0.75  # blocks for `fit` have at least this fraction of the sharpness of the image's sharpest block
FIT_STRIDE_PX = 16  # the few photographs are used in overlapping blocks
MODEL_FILE = Path(__file__).with_name("niqe.npz")
PROTOCOL = "fitted to photographs bundled with Paceline"
_SHAPES = torch.arange(0.2, 10.0005, 0.001, dtype=torch.float64)
_RATIOS = (2 * torch.lgamma(2 / _SHAPES) - torch.lgamma(1 / _SHAPES) - torch.lgamma(3 / _SHAPES)).exp()


class NiqeModel(NamedTuple):
    """Mean and covariance of the 36 block features of undistorted photographs."""

    mean: Tensor
    covariance: Tensor


@lru_cache(maxsize=1)
def load_model() -> NiqeModel:
    """Return the model that ships with Paceline."""
    with np.load(MODEL_FILE, allow_pickle=False) as stored:
        return NiqeModel(*(torch.from_numpy(stored[name]) for name in NiqeModel._fields))


def check_niqe_size(height: int, width: int, name: str) -> None:
    """Raise UserError if an image has fewer than two blocks."""
    if (height // BLOCK_PX) * (width // BLOCK_PX) < 2:
        raise UserError(
            f"{name}: {width}×{height} pixels is too small for NIQE, which needs at least {2 * BLOCK_PX}×{BLOCK_PX} "
            f"or {BLOCK_PX}×{2 * BLOCK_PX}; leave NIQE out, or use larger images"
        )


def niqe(levels: Tensor) -> Tensor:
    """Return the NIQE of each image [n, c, h, w] with values from 0 to 255, in float64."""
    height, width = levels.shape[-2:]
    check_niqe_size(height, width, "images")
    found = []
    for image in levels:
        features, _ = block_features(image, BLOCK_PX)
        own = NiqeModel(features.mean(0), _covariance(features))
        mean, covariance = (value.to(levels.device) for value in load_model())
        difference = own.mean - mean
        # Few blocks give a singular covariance, so the pseudoinverse is used.
        found.append((difference @ torch.linalg.pinv((covariance + own.covariance) / 2) @ difference).sqrt())
    return torch.stack(found)


def fit(images: Iterable[Tensor]) -> NiqeModel:
    """Return the model of undistorted images [c, h, w] with values from 0 to 255, using their sharp blocks only."""
    kept = []
    for image in images:
        features, sharpness = block_features(image, FIT_STRIDE_PX)
        kept.append(features[sharpness >= SHARP_SHARE * sharpness.max()])
    features = torch.cat(kept)
    return NiqeModel(features.mean(0), _covariance(features))


def block_features(image: Tensor, stride_px: int) -> tuple[Tensor, Tensor]:
    """Return the 36 features [blocks, 36] and the sharpness [blocks] of an image's blocks."""
    luma = _luma(image.double())
    height, width = (side - side % BLOCK_PX for side in luma.shape[-2:])
    luma = luma[..., :height, :width]
    features = []
    sharpness = torch.zeros(0)
    for scale in (1, 2):
        scaled = luma if scale == 1 else bicubic(luma, height // 2, width // 2)
        normalised, deviation = _normalise(scaled)
        side, step = BLOCK_PX // scale, stride_px // scale
        features.append(_statistics(_blocks(normalised, side, step)))
        if scale == 1:
            sharpness = _blocks(deviation, side, step).mean((1, 2))
    return torch.cat(features, dim=1), sharpness


def _luma(image: Tensor) -> Tensor:
    """Return the luma of an image [c, h, w] as [1, 1, h, w]."""
    if image.shape[0] == 1:
        return image[None]
    red, green, blue = image.unbind(0)
    return (LUMA[0] * red + LUMA[1] * green + LUMA[2] * blue)[None, None]


def _normalise(luma: Tensor) -> tuple[Tensor, Tensor]:
    """Return the locally normalised luma, and the local standard deviation."""
    mean = _window_mean(luma)
    deviation = (_window_mean(luma.square()) - mean.square()).abs().sqrt()
    return (luma - mean) / (deviation + 1), deviation


def _window_mean(images: Tensor) -> Tensor:
    weights = [math.exp(-((n - WINDOW // 2) ** 2) / (2 * SIGMA**2)) for n in range(WINDOW)]
    padded = F.pad(images, [WINDOW // 2] * 4, mode="replicate")
    for dim in (-2, -1):
        length = padded.shape[dim] - WINDOW + 1
        parts = [padded.narrow(dim, start, length) * (weight / sum(weights)) for start, weight in enumerate(weights)]
        padded = torch.stack(parts).sum(0)
    return padded


def _blocks(image: Tensor, side: int, step: int) -> Tensor:
    """Return the blocks [n, side, side] of an image [1, 1, h, w]."""
    return image[0, 0].unfold(0, side, step).unfold(1, side, step).reshape(-1, side, side)


def _statistics(blocks: Tensor) -> Tensor:
    """Return 18 features per block: the distributions of values, and of the products of neighbouring values."""
    shape, left, right, _ = _fit_asymmetric(blocks)
    features = [shape, (left + right) / 2]
    for rows, columns in NEIGHBOURS:
        shape, left, right, mean = _fit_asymmetric(blocks * blocks.roll((rows, columns), (1, 2)))
        features += [shape, mean, left, right]
    return torch.stack(features, dim=1)


def _fit_asymmetric(blocks: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Fit asymmetric generalised Gaussians by moments; return shape, left scale, right scale and mean per block."""
    values = blocks.flatten(1)
    tiny = torch.finfo(values.dtype).tiny
    left, right = (
        ((values.square() * side).sum(1) / side.sum(1).clamp(min=1)).sqrt().clamp(min=tiny**0.25)
        for side in (values < 0, values > 0)
    )
    balance = left / right
    ratio = values.abs().mean(1).square() / values.square().mean(1).clamp(min=tiny)
    ratio = ratio * (balance**3 + 1) * (balance + 1) / (balance.square() + 1).square()
    shapes, ratios = _SHAPES.to(values.device), _RATIOS.to(values.device)
    shape = shapes[torch.searchsorted(ratios, ratio).clamp(max=len(shapes) - 1)]
    width = ((torch.lgamma(1 / shape) - torch.lgamma(3 / shape)) / 2).exp()
    mean = (right - left) * width * (torch.lgamma(2 / shape) - torch.lgamma(1 / shape)).exp()
    return shape, left * width, right * width, mean


def _covariance(features: Tensor) -> Tensor:
    return torch.cov(features.t())
