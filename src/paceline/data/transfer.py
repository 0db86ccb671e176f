"""The last steps of every loader: copy batches to the device, and put channels first."""

from __future__ import annotations

import torch

from paceline.contracts.recipe import Batch
from paceline.data.stored_pixels import IMAGE_TYPES


def are_images(tensor: torch.Tensor) -> bool:
    """Return whether a field of a raw batch contains images rather than numbers."""
    return tensor.dtype in IMAGE_TYPES and tensor.ndim == 4


def upload(batch: Batch, device: torch.device) -> Batch:
    """Copy a batch to the device; copies to CUDA devices are asynchronous."""
    if device.type != "cuda":
        return {name: tensor.to(device) for name, tensor in batch.items()}
    return {name: tensor.pin_memory().to(device, non_blocking=True) for name, tensor in batch.items()}


def channels_first(batch: Batch) -> Batch:
    """View images [n, h, w, c] as [n, c, h, w] without copying; their memory format is torch's channels_last."""
    return {name: field.permute(0, 3, 1, 2) if are_images(field) else field for name, field in batch.items()}
