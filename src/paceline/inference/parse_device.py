"""Parse the device that a user passes in Python."""

from __future__ import annotations

import torch

from paceline.core.errors import UserError


def parse_device(wanted: str | torch.device) -> torch.device:
    """Return a device; raise UserError if this machine does not have it."""
    try:
        device = torch.device(wanted)
    except (RuntimeError, TypeError):
        device = torch.device("meta")
    if device.type not in ("cpu", "cuda"):
        raise UserError(f"device={str(wanted)!r}: expected 'cpu', 'cuda' or a GPU index such as 'cuda:1'")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UserError(f"device={str(wanted)!r}: no CUDA device is visible to PyTorch; use device='cpu'")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        last = torch.cuda.device_count() - 1
        raise UserError(f"device={str(wanted)!r}: there is no such GPU; the last GPU is 'cuda:{last}'")
    return device
