"""How many images per second each loader gives on this machine when nothing is trained: the ceiling of any training."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from paceline.config.settings import RunSettings
from paceline.config.spans import split_batch
from paceline.core.errors import UserError
from paceline.core.json_file import keep
from paceline.core.registry import load_class, names
from paceline.data.crop import check_crop, cropped
from paceline.data.loader import Loader
from paceline.data.loader_choice import choose_loader
from paceline.data.loaders.workers import BATCHES_PER_WORKER
from paceline.data.source import Source, sizes_of
from paceline.data.tickets import Stream, Tickets
from paceline.data.transforms import Augment, prepare
from paceline.parallel.world import join
from paceline.runs.machine_record import LOADERS, identity, kept_file, read_kept

BLOCKS = 5
BLOCK_SECONDS = 1.0


def measure_loaders(settings: RunSettings, console: Console) -> int:
    """Measures every loader on the training split, prints a table and keeps it; 1 where none could serve the data."""
    device = join(settings, distributed=False).device
    source = load_class("source", settings.data, Source)("train", settings)
    for note in source.notes:
        console.print(note, soft_wrap=True)
    check_crop(sizes_of(source), settings.crop, source.spec.scale, source.name_of)
    batch_size = split_batch(settings.batch_size, 1, 1)
    measured = [_measure(name, source, device, settings, batch_size) for name in names("loader")]
    _print_table(console, measured, source, device, settings, batch_size)
    result = {
        "data": settings.data,
        "data_root": str(Path(settings.data_root).expanduser().resolve()),
        "samples": len(source),
        "device": device.type,
        "batch_size": batch_size,
        "crop": settings.crop,
        "workers": settings.workers,
        "loaders": measured,
        "machine": identity(),
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    others = [one for one in read_kept(LOADERS).get("measured", []) if _place(one) != _place(result)]
    keep(kept_file(LOADERS), {"measured": [*others, result]})
    console.print(f"kept in {kept_file(LOADERS)}", soft_wrap=True)
    return int(not any(one["images_per_second"] for one in measured))


def _place(result: dict[str, Any]) -> tuple[Any, ...]:
    """What a newer measurement takes the place of."""
    return tuple(result[name] for name in ("data", "data_root", "device", "batch_size", "crop", "workers"))


def _measure(name: str, source: Source, device: torch.device, settings: RunSettings, batch_size: int) -> dict[str, Any]:
    """The rates of some blocks of batches, augmented and scaled on the device; or why there are none."""
    augment = Augment.from_settings(settings, cropped(source.spec, settings.crop))
    start = time.perf_counter()
    try:
        loader = _build(name, source, device, settings)
    except UserError as refused:
        return {"loader": name, "images_per_second": None, "why": str(refused)}
    batches = (prepare(raw, augment, torch.float32) for raw in loader.load(_requests(len(source), batch_size)))
    try:
        next(batches)
        _await(device)
        first = time.perf_counter() - start
        for _ in range(_warmup_batches(settings)):
            next(batches)
        rates = [_rate(batches, batch_size, device) for _ in range(BLOCKS)]
    except UserError as refused:
        return {"loader": name, "images_per_second": None, "why": str(refused)}
    finally:
        loader.close()
    return {
        "loader": name,
        "images_per_second": float(np.median(rates)),
        "low": min(rates),
        "high": max(rates),
        "n": len(rates),
        "seconds_to_first_batch": first,
        "why": "",
    }


def _build(name: str, source: Source, device: torch.device, settings: RunSettings) -> Loader:
    """The loader as a run would have it; a run that has no room for resident data takes another loader."""
    choice = choose_loader(dataclasses.replace(settings, loader=name), source, device)
    if choice.name != name:
        raise UserError(f"--loader {name}: {choice.why}")
    return choice.build(source, device, settings, settings.crop)


def _warmup_batches(settings: RunSettings) -> int:
    """More than any loader has ready when the clock starts."""
    return 8 + BATCHES_PER_WORKER * settings.workers


def _requests(length: int, batch_size: int) -> Iterator[Tickets]:
    stream, start = Stream(0, length), 0
    while True:
        yield stream.take(start, start + batch_size)
        start += batch_size


def _rate(batches: Iterator[Any], batch_size: int, device: torch.device) -> float:
    _await(device)
    start, count = time.perf_counter(), 0
    while time.perf_counter() - start < BLOCK_SECONDS:
        next(batches)
        count += batch_size
        if device.type == "cuda" and count % (64 * batch_size) == 0:
            _await(device)  # the host must not run far ahead of what it has only asked for
    _await(device)
    return count / (time.perf_counter() - start)


def _await(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _print_table(
    console: Console,
    measured: list[dict[str, Any]],
    source: Source,
    device: torch.device,
    settings: RunSettings,
    batch_size: int,
) -> None:
    crop = f", crop {settings.crop}" if settings.crop else ""
    title = f"loading alone: {settings.data}, {len(source):,} samples, batch {batch_size}{crop}, {device.type}"
    table = Table(title=f"{title}, {settings.workers} workers", title_justify="left")
    for heading in ("loader", "images/s", "low – high", "n", "to the first batch"):
        table.add_column(heading, justify="left" if heading == "loader" else "right", no_wrap=True)
    for one in measured:
        if one["images_per_second"] is None:
            table.add_row(one["loader"], "–", "–", "–", "–")
            continue
        spread = f"{one['low']:,.0f} – {one['high']:,.0f}"
        first = f"{one['seconds_to_first_batch']:.1f} s"
        table.add_row(one["loader"], f"{one['images_per_second']:,.0f}", spread, str(one["n"]), first)
    console.print(table)
    for one in measured:
        if one["why"]:
            console.print(f"not measured: {one['why']}", soft_wrap=True)
