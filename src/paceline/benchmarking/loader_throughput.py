"""Measure the throughput of each loader on this machine without training, as an upper bound on training speed."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from itertools import count
from typing import NamedTuple

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from paceline.benchmarking.step_ladder import synchronize
from paceline.config.settings import RunSettings, split_batch
from paceline.contracts.recipe import Batch
from paceline.core.errors import UserError
from paceline.core.registry import load_class, load_classes
from paceline.core.terminal import activity
from paceline.data.loader import BatchPipeline, Loader, choose_loader
from paceline.data.source import Source, sizes_of
from paceline.data.stream import Augment, Stream, check_crop, cropped
from paceline.data.worker_pool import BATCHES_PER_WORKER
from paceline.parallel.world import join

BLOCKS = 5
BLOCK_SECONDS = 1.0
WARMUP_BATCHES = 8


class LoaderRate(NamedTuple):
    """The images per second of a loader in each block of batches, and the seconds until its first batch."""

    images_per_second: list[float]
    seconds_to_first_batch: float


def measure_loaders(settings: RunSettings, console: Console) -> int:
    """Measure every loader on the training split and print the results; return 1 if no loader worked."""
    device = join(settings, distributed=False).device
    source = load_class("source", settings.data, Source)("train", settings)
    for note in source.notes:
        console.print(note, soft_wrap=True)
    check_crop(sizes_of(source), settings.crop, source.spec.scale, source.name_of)
    batch_size = split_batch(settings.batch_size, 1, 1)
    crop = f", crop {settings.crop}" if settings.crop else ""
    data = f"{settings.data}, {len(source):,} samples, batch {batch_size}{crop}"
    title = f"loading without training: {data}, {device.type}, --workers {settings.workers}"
    table = Table(title=title, title_justify="left")
    for heading in ("loader", "images/s", "low – high", "n", "time to first batch"):
        table.add_column(heading, justify="left" if heading == "loader" else "right", no_wrap=True)
    obstacles = []
    for name in load_classes("loader", Loader):
        activity(f"measuring the loader {name}")
        try:
            rates, first = _measure(name, source, device, settings, batch_size)
        except UserError as error:
            obstacles.append(f"not measured: {error}")
            table.add_row(name, *["–"] * 4)
            continue
        spread = f"{min(rates):,.0f} – {max(rates):,.0f}"
        table.add_row(name, f"{np.median(rates):,.0f}", spread, str(len(rates)), f"{first:.1f} s")
    console.print(table)
    for obstacle in obstacles:
        console.print(obstacle, soft_wrap=True)
    return int(len(obstacles) == table.row_count)


def _measure(name: str, source: Source, device: torch.device, settings: RunSettings, batch_size: int) -> LoaderRate:
    """Measure the throughput of a loader, including augmentation and scaling on the device."""
    augment = Augment.from_settings(settings, cropped(source.spec, settings.crop))
    start = time.perf_counter()
    choice = choose_loader(dataclasses.replace(settings, loader=name), source, device)
    if choice.name != name:
        raise UserError(f"--loader {name}: {choice.reason}")
    loader = choice.build(source, device, settings, settings.crop)
    stream = Stream(0, len(source), source.shuffle)
    tickets = (stream.take(position, position + batch_size) for position in count(step=batch_size))
    batches = BatchPipeline(loader, augment, torch.float32).batches(tickets)
    try:
        next(batches)
        synchronize(device)
        first = time.perf_counter() - start
        for _ in range(WARMUP_BATCHES + BATCHES_PER_WORKER * settings.workers):  # so that no prefetched batch is timed
            next(batches)
        return LoaderRate([_rate(batches, batch_size, device) for _ in range(BLOCKS)], first)
    finally:
        loader.close()


def _rate(batches: Iterator[Batch], batch_size: int, device: torch.device) -> float:
    synchronize(device)
    start, num_images = time.perf_counter(), 0
    while time.perf_counter() - start < BLOCK_SECONDS:
        next(batches)
        num_images += batch_size
        if num_images % (64 * batch_size) == 0:
            synchronize(device)  # the host must not run far ahead of the device
    synchronize(device)
    return num_images / (time.perf_counter() - start)
