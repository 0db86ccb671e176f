"""The error message when a device runs out of memory: where it happened, and which settings would fit."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from paceline.config.resolve import Config
from paceline.config.spans import split_batch
from paceline.core.errors import UserError
from paceline.core.host_memory import free_host_bytes
from paceline.data.open_sources import open_sources
from paceline.data.source import Source
from paceline.parallel.strategy import strategy_class
from paceline.training.build import Parts
from paceline.training.memory_forecast import Forecast, forecast, gib

SMALL_SHARE = 1e-5  # the activations of a ResNet need up to 70,000 times as much memory as small grey images
SHORT = "use a smaller --batch-size, --accumulate 2 or --set checkpoint_activations=on"


def explain_out_of_memory(error: torch.OutOfMemoryError, parts: Parts) -> str:
    """Return in which phase the device ran out of memory, and settings that fit. The process must end afterwards."""
    where = "".join(f" in {note}" for note in getattr(error, "__notes__", []))
    sources = {split: loader.source for split, loader in parts.loaders.items()}
    config = parts.config.with_run(accelerator=parts.world.device.type)
    try:
        advice = suggest(config, _usable_bytes(parts.world.device), sources)
    except Exception:  # the forecast is optional; the error must be reported in any case
        advice = SHORT
    return f"out of memory{where}: {advice}"


def suggest(config: Config, device_bytes: int, sources: Mapping[str, Source] | None = None) -> str:
    """Return the memory that a step needs and the settings with which it would fit in a device's memory."""
    return _describe(forecast(config, device_bytes, sources), device_bytes)


def check_step_fits(config: Config, num_sharing: int) -> None:
    """Raise UserError if a step on the CPU needs too much memory. The process must not train afterwards.

    `num_sharing` is the number of processes that take such a step at the same time. The forecast takes seconds, so it
    is skipped if the images of a batch need only a tiny part of the memory.
    """
    free, sources = free_host_bytes() // num_sharing, open_sources(config)
    batch = split_batch(config.run.batch_size, 1, config.run.accumulate) // config.run.accumulate
    if batch * sum(field.nbytes for field in sources["train"].read(0).values()) < free * SMALL_SHARE:
        return
    found = forecast(config.with_run(accelerator="cpu"), free, sources)
    memory = found.memory(strategy_class(config), 1, found.samples_per_device(1))
    if not found.fits(memory, free):
        raise UserError(_describe(found, free))


def _describe(found: Forecast, device_bytes: int) -> str:
    config = found.config
    strategy, devices = strategy_class(config), config.run.devices
    memory = found.memory(strategy, devices, found.samples_per_device(devices))
    needed = (
        f"a step with batch {config.run.batch_size} needs about {gib(memory.total)} of {gib(device_bytes)} GiB, "
        f"mostly {memory.largest} in phase {memory.phase!r}"
    )
    options = _options(found, device_bytes)
    if options:
        return f"{needed}; use {', or '.join(options)}"
    if found.fits(memory, device_bytes):
        return f"{needed}; check whether other processes use the device, or {SHORT}"
    return f"{needed}; {found.advice(memory)}"


def _options(found: Forecast, device_bytes: int) -> list[str]:
    """Return settings that fit, the ones that change the least first; empty if the step fits as it is, or never."""
    config, strategy, devices = found.config, strategy_class(found.config), found.config.run.devices
    batch = split_batch(config.run.batch_size, devices, config.run.accumulate)
    is_recomputed = found.recomputes(strategy, devices)
    largest = found.largest_batch(strategy, devices, device_bytes, recompute=is_recomputed)
    options: list[str] = []
    if largest >= batch:
        return options
    per_device = largest // devices // config.run.accumulate
    if per_device:
        options.append(f"--accumulate {math.ceil(batch / devices / per_device)}")
    if not is_recomputed and found.can_recompute(strategy):
        recomputed = found.largest_batch(strategy, devices, device_bytes, recompute=True)
        smaller = f" --batch-size {recomputed}" if recomputed < batch else ""
        if recomputed > largest:
            options.append(f"--set checkpoint_activations=on{smaller}")
    return [*options, f"--batch-size {largest}"] if largest else options


def _usable_bytes(device: torch.device) -> int:
    """Return the memory that this process can use: what it holds now, and what no process uses."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device)
    return free_host_bytes()
