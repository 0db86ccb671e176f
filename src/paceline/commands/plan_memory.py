"""`paceline plan --memory`: print the memory that a recipe needs per device, and the largest batch that fits."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from rich.console import Console

from paceline.commands.configure import configure
from paceline.commands.full_width_table import print_table
from paceline.core.activity import end_activity
from paceline.core.errors import UserError
from paceline.core.registry import load_classes
from paceline.core.screen import open_screen
from paceline.core.types import SettingValue
from paceline.parallel.strategy import Strategy
from paceline.training.memory_forecast import GIB, USABLE, DeviceMemory, Forecast, forecast, gib
from paceline.training.storage_log import Kind

UNITS = {"B": 1, "MB": 10**6, "GB": 10**9, "TB": 10**12, "MIB": 2**20, "GIB": GIB, "TIB": 2**40}
SHOWN = (Kind.WEIGHTS, Kind.GRADIENTS, Kind.OPTIMIZER, Kind.EMA, Kind.ACTIVATIONS)


class Row(NamedTuple):
    """One strategy on a number of devices."""

    name: str
    strategy: type[Strategy]
    devices: int


def plan_memory(
    recipe: str,
    flags: Mapping[str, SettingValue],
    counts: Sequence[int],
    per_node: int,
    device_memory: str,
    *,
    config_file: str = "",
    assignments: Sequence[str] = (),
) -> int:
    """Print the memory of each strategy on each number of devices, computed without training or a GPU.

    `per_node` is the number of devices per host, which limits strategies that run in one process.
    """
    device_bytes = parse_bytes(device_memory) if device_memory else _bytes_of_this_gpu()
    settings = {name: value for name, value in flags.items() if name != "devices"}
    config = configure(recipe, settings, config_file=config_file, assignments=assignments, elsewhere=True)
    found = forecast(config, device_bytes)
    end_activity()
    console = open_screen(soft_wrap=True)
    rows = list(_rows(found, counts, per_node))
    _print_memory(console, found, rows, device_bytes)
    _print_notes(console, found, rows, device_bytes)
    if too_many := [devices for devices in counts if not found.can_divide(devices)]:
        batch = config.run.batch_size
        console.print(f"{too_many[0]} or more devices: not shown, because --batch-size {batch} is too small")
    if per_node < max(counts):
        _print_note_on_nodes(console, rows, per_node)
    if device_bytes:
        _check_fits(found, rows, device_bytes, device_memory)
    return 0


def parse_bytes(text: str) -> int:
    """Return the number of bytes in a text like 24GiB or 80GB."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]+)\s*", text)
    if not match or match[2].upper() not in UNITS or float(match[1]) == 0:
        raise UserError(f"--device-memory {text}: expected a size like 24GiB or 80GB")
    return int(float(match[1]) * UNITS[match[2].upper()])


def _bytes_of_this_gpu() -> int:
    """Return the memory of the first GPU; 0 if there is none."""
    return torch.cuda.get_device_properties(0).total_memory if torch.cuda.is_available() else 0


def _rows(found: Forecast, counts: Sequence[int], per_node: int) -> Iterator[Row]:
    """Yield each strategy with each number of devices that it can use and that the batch can be divided among."""
    strategies = sorted(load_classes("strategy", Strategy).items(), key=lambda item: item[1].complexity)
    for name, strategy in strategies:
        limit = strategy.device_limit()
        for devices in counts:
            can_use = (limit is None or devices <= limit) and (strategy.needs_processes or devices <= per_node)
            if can_use and found.can_divide(devices):
                yield Row(name, strategy, devices)


def _print_memory(console: Console, found: Forecast, rows: Sequence[Row], device_bytes: int) -> None:
    memories = [found.memory(row.strategy, row.devices, found.samples_per_device(row.devices)) for row in rows]
    unit = "GiB" if max(memory.total for memory in memories) >= GIB else "MiB"
    title = f"{unit} per device, batch {found.config.run.batch_size}"
    headings = ["strategy", "devices", "per device", *SHOWN, "other", "total"]
    headings += ["largest batch", "recomputed"] if device_bytes else []
    lines = []
    for row, memory in zip(rows, memories, strict=True):
        samples = found.samples_per_device(row.devices)
        lines.append([row.name, str(row.devices), str(samples), *_cells(memory, UNITS[unit.upper()])])
        if device_bytes:
            lines[-1] += [_largest(found, row, device_bytes, recompute) for recompute in (False, True)]
    print_table(console, title, headings, lines, num_texts=1)


def _cells(memory: DeviceMemory, unit_bytes: int) -> list[str]:
    sizes = [memory.bytes.get(kind, 0) for kind in SHOWN]
    return [f"{size / unit_bytes:,.2f}" for size in (*sizes, memory.total - sum(sizes), memory.total)]


def _largest(found: Forecast, row: Row, device_bytes: int, recompute: bool) -> str:
    if recompute and not found.can_recompute(row.strategy):
        return "–"
    return f"{found.largest_batch(row.strategy, row.devices, device_bytes, recompute=recompute):,}"


def _print_notes(console: Console, found: Forecast, rows: Sequence[Row], device_bytes: int) -> None:
    memory = found.memory(Strategy, 1, found.samples_per_device(1))
    console.print(f"peak on one device: in phase {memory.phase!r}, which updates {memory.network!r}")
    console.print(
        "other: the batch, samples kept on the device, frozen networks, buckets, gathered weights, CUDA graphs"
    )
    if recomputing := dict.fromkeys(row.name for row in rows if found.recomputes(row.strategy, row.devices)):
        console.print(f"activations: recomputed in the backward pass under {', '.join(recomputing)}")
    console.print("not included: the CUDA context, cuDNN workspaces and fragmentation")
    if device_bytes:
        console.print(
            f"largest batch: fits in {USABLE:.0%} of {gib(device_bytes)} GiB, with activations stored, "
            "and recomputed (--set checkpoint_activations=on)"
        )
    else:
        console.print("add --device-memory, e.g. --device-memory 24GiB, to find the largest batch that fits")


def _print_note_on_nodes(console: Console, rows: Sequence[Row], per_node: int) -> None:
    """Print which strategies cannot use devices on several hosts, because they run in one process."""
    local = (row for row in rows if not row.strategy.needs_processes and row.strategy.device_limit() is None)
    for name in dict.fromkeys(row.name for row in local):
        what = f"{per_node} device{'s' * (per_node > 1)}"
        console.print(f"{name}: runs in one process, so it cannot use more than one node ({what})")


def _check_fits(found: Forecast, rows: Sequence[Row], device_bytes: int, given: str) -> None:
    """Raise UserError if not even the smallest batch fits with any strategy."""
    if any(
        found.largest_batch(row.strategy, row.devices, device_bytes, recompute=recompute)
        for row in rows
        for recompute in (False, True)
    ):
        return
    needed = min((found.memory(row.strategy, row.devices, 1) for row in rows), key=lambda memory: memory.total)
    raise UserError(
        f"--device-memory {given or gib(device_bytes) + 'GiB'}: one image per device needs {gib(needed.total)} GiB, "
        f"of which {needed.largest} {gib(needed.bytes[needed.largest])} GiB in phase {needed.phase!r}: "
        f"{found.advice(needed)}"
    )
