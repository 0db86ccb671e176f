"""Choose the device for commands that use only one."""

from __future__ import annotations

import torch

from paceline.parallel.world import check_devices, uses_cuda
from paceline.runs.config import resolve_settings


def choose_device(command: str, accelerator: str) -> torch.device:
    """Return the device given by `--accelerator`: by default, a GPU if there is one."""
    settings = resolve_settings(command, [("flag", {"accelerator": accelerator or "auto"})])
    check_devices(settings)
    return torch.device("cuda:0" if uses_cuda(settings) else "cpu")
