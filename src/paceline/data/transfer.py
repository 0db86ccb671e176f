"""The last steps of every loader: batches go to the device, and channels come before rows."""

from __future__ import annotations

import torch

from paceline.contracts.recipe import Batch


def are_images(tensor: torch.Tensor) -> bool:
    """Return whether a field of a raw batch holds images, rather than numbers."""
    return tensor.dtype == torch.uint8 and tensor.ndim == 4


def upload(batch: Batch, device: torch.device) -> Batch:
    """Return the batch on the device; on CUDA the copies continue while the caller does."""
    if device.type != "cuda":
        return {name: tensor.to(device) for name, tensor in batch.items()}
    return {name: tensor.pin_memory().to(device, non_blocking=True) for name, tensor in batch.items()}


def channels_first(batch: Batch) -> Batch:
    """Return images [n, h, w, c] viewed as [n, c, h, w]; in memory they stay, which is torch's channels_last."""
    return {name: field.permute(0, 3, 1, 2) if are_images(field) else field for name, field in batch.items()}
