"""Which loader suits a source and a device."""

from __future__ import annotations

import torch

from paceline.config import RunSettings
from paceline.data.loaders import resident
from paceline.data.source import Source


def choose_loader(settings: RunSettings, source: Source, device: torch.device) -> tuple[str, str]:
    """The name of the loader to use, and why."""
    if settings.loader != "auto":
        return settings.loader, "asked for"
    sharers = settings.devices if device.type == "cpu" else 1
    fits, reason = resident.fits(source, device, sharers)
    return ("resident" if fits else "workers"), reason
