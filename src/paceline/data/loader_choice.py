"""Which loader suits a source and a device."""

from __future__ import annotations

import torch

from paceline.data.loaders import resident
from paceline.data.source import Source, decodes
from paceline.settings import RunSettings


def choose_loader(settings: RunSettings, source: Source, device: torch.device) -> tuple[str, str]:
    """The name of the loader to use, and why: in the device's memory, else in the host's, else from the files."""
    if settings.loader not in ("auto", "resident"):
        return settings.loader, "asked for"
    on_cpu = device.type == "cpu"
    if on_cpu and settings.loader == "resident":
        return "resident", "asked for"
    fits, reason = resident.fits(source, device, settings.devices if on_cpu else 1)
    if fits:
        return "resident", reason
    if not on_cpu:
        fits, host_reason = resident.fits(source, torch.device("cpu"), settings.devices)
        reason = f"{reason}; {host_reason}"
        if fits:
            return "resident", f"{reason}: batches are picked in the host's memory"
    return "workers", reason if not decodes(source) else f"{reason}; `paceline pack` would save them the decoding"
