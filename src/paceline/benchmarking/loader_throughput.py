"""Measure the throughput of each loader on this machine without training, as an upper bound on training speed."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from paceline.config.settings import RunSettings
from paceline.config.spans import split_batch
from paceline.contracts.recipe import Batch
from paceline.core.errors import UserError
from paceline.core.files import user_path
from paceline.core.registry import load_class, load_classes
from paceline.core.terminal import activity
from paceline.data.feed import BatchPipeline
from paceline.data.loader import Loader, choose_loader
from paceline.data.source import Source, sizes_of
from paceline.data.stream import Stream, Tickets, check_crop, cropped
from paceline.data.transforms import Augment
from paceline.data.worker_pool import BATCHES_PER_WORKER
from paceline.parallel.world import join
from paceline.runs.provenance import LOADERS, identity, read_cached, store_cached

BLOCKS = 5
BLOCK_SECONDS = 1.0
WARMUP_BATCHES = 8


@dataclass(frozen=True)
class LoaderRate:
    """The throughput of one loader over several blocks of batches, or why it was not measured."""

    loader: str
    images_per_second: float | None = None  # median over the blocks of batches
    low: float = 0.0
    high: float = 0.0
    n: int = 0
    seconds_to_first_batch: float = 0.0
    reason: str = ""  # why the loader was not measured; empty if it was


@dataclass(frozen=True)
class LoaderMeasurement:
    """The throughput of every loader for one data source, as saved to a file."""

    data: str
    data_root: str
    num_samples: int
    device: str
    batch_size: int
    crop: int
    workers: int
    loaders: list[LoaderRate]
    machine: Mapping[str, str]
    measured_at: str

    def replaces(self, other: Mapping[str, object]) -> bool:
        """Return whether a saved measurement has the same settings as this one."""
        same = ("data", "data_root", "device", "batch_size", "crop", "workers")
        return all(other.get(name) == getattr(self, name) for name in same)


def measure_loaders(settings: RunSettings, console: Console) -> int:
    """Measure every loader on the training split, and print and save the results; return 1 if no loader worked."""
    device = join(settings, distributed=False).device
    source = load_class("source", settings.data, Source)("train", settings)
    for note in source.notes:
        console.print(note, soft_wrap=True)
    check_crop(sizes_of(source), settings.crop, source.spec.scale, source.name_of)
    batch_size = split_batch(settings.batch_size, 1, 1)
    measured = LoaderMeasurement(
        data=settings.data,
        data_root=str(user_path(settings.data_root).resolve()),
        num_samples=len(source),
        device=device.type,
        batch_size=batch_size,
        crop=settings.crop,
        workers=settings.workers,
        loaders=[_measure(name, source, device, settings, batch_size) for name in _announced_loaders()],
        machine=identity(),
        measured_at=datetime.now(UTC).isoformat(timespec="seconds"),
    )
    _print_table(console, measured)
    others = [one for one in read_cached(LOADERS).get("measurements", []) if not measured.replaces(one)]
    saved = store_cached(LOADERS, {"measurements": [*others, dataclasses.asdict(measured)]})
    console.print(saved, soft_wrap=True)
    return int(not any(one.images_per_second for one in measured.loaders))


def _announced_loaders() -> Iterator[str]:
    """Yield the names of all loaders, and report each one before it is measured."""
    for name in load_classes("loader", Loader):
        activity(f"measuring the loader {name}")
        yield name


def _measure(name: str, source: Source, device: torch.device, settings: RunSettings, batch_size: int) -> LoaderRate:
    """Measure the throughput of a loader, including augmentation and scaling on the device."""
    augment = Augment.from_settings(settings, cropped(source.spec, settings.crop))
    start = time.perf_counter()
    try:
        loader = _build(name, source, device, settings)
    except UserError as error:
        return LoaderRate(name, reason=str(error))
    batches = BatchPipeline(loader, augment, torch.float32).batches(_requests(source, batch_size))
    try:
        next(batches)
        _synchronize(device)
        first = time.perf_counter() - start
        for _ in range(_warmup_batches(loader)):
            next(batches)
        rates = [_rate(batches, batch_size, device) for _ in range(BLOCKS)]
    except UserError as error:
        return LoaderRate(name, reason=str(error))
    finally:
        loader.close()
    return LoaderRate(name, float(np.median(rates)), min(rates), max(rates), len(rates), first)


def _build(name: str, source: Source, device: torch.device, settings: RunSettings) -> Loader:
    """Build the loader as in training; raise UserError if training would use a different loader."""
    choice = choose_loader(dataclasses.replace(settings, loader=name), source, device)
    if choice.name != name:
        raise UserError(f"--loader {name}: {choice.reason}")
    return choice.build(source, device, settings, settings.crop)


def _warmup_batches(loader: Loader) -> int:
    """Return the number of warm-up batches: enough that no prefetched batch is timed."""
    return WARMUP_BATCHES + BATCHES_PER_WORKER * loader.settings.workers


def _requests(source: Source, batch_size: int) -> Iterator[Tickets]:
    stream, start = Stream(0, len(source), source.shuffle), 0
    while True:
        yield stream.take(start, start + batch_size)
        start += batch_size


def _rate(batches: Iterator[Batch], batch_size: int, device: torch.device) -> float:
    _synchronize(device)
    start, count = time.perf_counter(), 0
    while time.perf_counter() - start < BLOCK_SECONDS:
        next(batches)
        count += batch_size
        if device.type == "cuda" and count % (64 * batch_size) == 0:
            _synchronize(device)  # the host must not run far ahead of the device
    _synchronize(device)
    return count / (time.perf_counter() - start)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _print_table(console: Console, measured: LoaderMeasurement) -> None:
    crop = f", crop {measured.crop}" if measured.crop else ""
    data = f"{measured.data}, {measured.num_samples:,} samples, batch {measured.batch_size}{crop}"
    title = f"loading without training: {data}, {measured.device}, --workers {measured.workers}"
    table = Table(title=title, title_justify="left")
    for heading in ("loader", "images/s", "low – high", "n", "time to first batch"):
        table.add_column(heading, justify="left" if heading == "loader" else "right", no_wrap=True)
    for one in measured.loaders:
        if one.images_per_second is None:
            table.add_row(one.loader, "–", "–", "–", "–")
            continue
        spread, first = f"{one.low:,.0f} – {one.high:,.0f}", f"{one.seconds_to_first_batch:.1f} s"
        table.add_row(one.loader, f"{one.images_per_second:,.0f}", spread, str(one.n), first)
    console.print(table)
    for one in measured.loaders:
        if one.reason:
            console.print(f"not measured: {one.reason}", soft_wrap=True)
