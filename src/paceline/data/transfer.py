"""What all loaders do with a batch at its end: onto the device, and channels before rows."""

from __future__ import annotations

import torch

from paceline.contracts.recipe import Batch
from paceline.data.loader import are_pictures


def upload(batch: Batch, device: torch.device) -> Batch:
    """The batch on the device; on CUDA the copies run on while the caller goes on."""
    if device.type != "cuda":
        return {name: tensor.to(device) for name, tensor in batch.items()}
    return {name: tensor.pin_memory().to(device, non_blocking=True) for name, tensor in batch.items()}


def channels_first(batch: Batch) -> Batch:
    """Pictures [n, h, w, c] seen as [n, c, h, w]; in memory they stay as they are, which is torch's channels_last."""
    return {name: field.permute(0, 3, 1, 2) if are_pictures(field) else field for name, field in batch.items()}


def channels_last(batch: Batch) -> Batch:
    """Undoes `channels_first`."""
    return {name: field.permute(0, 2, 3, 1) if are_pictures(field) else field for name, field in batch.items()}
