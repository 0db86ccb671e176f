"""Splits images into batches like those of `paceline evaluate`."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from paceline.data.feed import EVALUATION_BATCH, EVALUATION_PIXELS


def split_as_in_evaluation(images: Tensor) -> Iterator[Tensor]:
    """Yield [n, c, h, w] tensors whose size and memory layout are those of batches in an evaluation."""
    count = max(1, min(EVALUATION_BATCH, EVALUATION_PIXELS // max(1, images.shape[2] * images.shape[3])))
    for start in range(0, len(images), count):
        # The loaders' layout is [n, h, w, c]; convolutions in other layouts round differently.
        rows = images[start : start + count].permute(0, 2, 3, 1)
        yield rows.clone(memory_format=torch.contiguous_format).permute(0, 3, 1, 2)
