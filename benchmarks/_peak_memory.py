"""Measure the peak memory of one process while it trains; run in each process by fsdp_memory.py."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from _resident_memory import peak_resident_bytes, reset_peak, resident_bytes

from paceline.config.resolve import Config
from paceline.training.build import assemble
from paceline.training.snapshot import take_snapshot

MEBIBYTE = 2**20


def measure_peak_memory(config: Config, folder: str, steps: int) -> None:
    """Train for some steps and write this process's memory in MiB to FOLDER/RANK.json.

    On a CPU, the memory is the resident set beyond what the process used before the networks were built. It includes
    the batches and the memory that libraries keep for reuse.
    """
    before = resident_bytes() / MEBIBYTE
    parts = assemble(config)
    device = parts.world.device
    _reset_peak(device)
    parts.recipe.train()
    for data in parts.feed.steps(0, steps * parts.feed.images_per_step):
        parts.step(data)
    training = _peak(device, before)
    _reset_peak(device)
    snapshot = take_snapshot(0, parts.step, None, -1, {})()
    result = {
        "parameters": sum(parameter.numel() for parameter in parts.recipe.parameters()),
        "training_mib": training,
        "saving_mib": _peak(device, before),
        "snapshot_mib": sum(t.nbytes for t in (*snapshot.weights.values(), *snapshot.state.values())) / MEBIBYTE,
        "notes": parts.notes,
    }
    Path(folder, f"{parts.world.rank}.json").write_text(json.dumps(result))
    parts.world.wait_for_all()
    parts.world.leave()


def _reset_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    else:
        reset_peak()


def _peak(device: torch.device, before: float) -> float:
    if device.type == "cuda":
        return float(torch.cuda.max_memory_allocated(device) / MEBIBYTE)
    return peak_resident_bytes() / MEBIBYTE - before
