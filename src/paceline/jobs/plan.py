"""`paceline plan`: how fast a recipe will be on more devices, predicted from a short measurement on this machine's."""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich import box
from rich.console import Console
from rich.table import Table

from paceline.config import Config
from paceline.engine.signals import INTERRUPTED
from paceline.errors import UserError
from paceline.jobs._prediction import Link, Measurement, predict, stops_paying_at
from paceline.jobs.configure import configure
from paceline.jobs.worker import run_in_processes
from paceline.parallel.environment import uses_cuda
from paceline.span import split_batch

SECONDS_A_DAY = 86_400
USUAL_LATENCY_SECONDS = 20e-6  # of one exchange between GPUs, where nothing was measured or said
UNITS = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}


@dataclass(frozen=True)
class Wish:
    """What a person asked for besides the settings of a run."""

    nodes: int = 1
    bandwidth: str = ""
    latency: str = ""
    check: bool = False


def plan(
    recipe: str,
    flags: dict[str, Any],
    wish: Wish,
    *,
    config_file: str = "",
    assignments: Sequence[str] = (),
) -> int:
    """Measures, predicts and prints; with `check` also measures what was predicted."""
    flags = dict(flags)
    devices = _whole(str(flags.pop("devices", "8")))
    config = configure(recipe, flags, config_file=config_file, assignments=assignments)
    batch = split_batch(config.run.batch_size, devices, config.run.accumulate)
    if devices % wish.nodes:
        raise UserError(f"--nodes {wish.nodes}: does not divide --devices {devices}")
    given = parse_bandwidth(wish.bandwidth) if wish.bandwidth else None
    latency = parse_seconds(wish.latency) if wish.latency else None
    processes = _processes_here(config, devices // wish.nodes)
    if given is None and (processes == 1 or wish.nodes > 1) and devices > 1:
        what = f"--nodes {wish.nodes}" if wish.nodes > 1 else f"--devices {devices}"
        raise UserError(f"{what}: the link between devices cannot be measured here; say it, like --bandwidth 25GB/s")
    if wish.check and processes != devices:
        raise UserError(f"--check: only as many devices as this machine has can be measured, here {processes}")
    counts = _counts(devices)
    sizes = sorted({max(1, batch // n) for n in counts}, reverse=True)
    config = config.with_run(devices=processes, strategy="ddp", batch_size=str(batch))
    measured = _measure(config, sizes, wish.check)
    link = measured.link
    if given is not None:
        link = Link(latency if latency is not None else USUAL_LATENCY_SECONDS, given, 2)
    assert link is not None or devices == 1
    console = Console(highlight=False)
    _say_what_was_measured(console, config, measured, link, given is not None, processes)
    _print_table(console, config, measured, link, counts, batch, weak=False)
    if devices > 1:
        _print_table(console, config, measured, link, counts, batch, weak=True)
        _say_where_it_ends(console, measured, link, batch)
    if wish.check:
        _say_error(console, measured)
    return 0


def _processes_here(config: Config, per_node: int) -> int:
    """How many of a machine's devices can be measured at once here."""
    if uses_cuda(config.run):
        return min(per_node, torch.cuda.device_count())
    cores = len(os.sched_getaffinity(0))
    threads = int(os.environ.get("OMP_NUM_THREADS", "1"))
    return max(1, min(per_node, cores // max(1, threads)))


def _measure(config: Config, sizes: Sequence[int], check: bool) -> Measurement:
    with tempfile.TemporaryDirectory(prefix="paceline-plan-") as folder:
        path = Path(folder) / "measured.json"
        code = run_in_processes("_measurement", config, str(path), ",".join(map(str, sizes)), str(int(check)))
        if code == INTERRUPTED:
            raise KeyboardInterrupt
        if code or not path.is_file():
            raise UserError(f"the measurement ended with exit code {code}")
        return Measurement.from_dict(json.loads(path.read_text()))


def _counts(devices: int) -> list[int]:
    """1, 2, 4 … up to the devices that were asked for."""
    counts = [2**power for power in range(devices.bit_length()) if 2**power < devices]
    return [*counts, devices]


def _say_what_was_measured(
    console: Console, config: Config, measured: Measurement, link: Link | None, given: bool, processes: int
) -> None:
    together = f"{processes} processes at once" if processes > 1 else "one process"
    sizes = ", ".join(f"{batch}: {seconds * 1e3:.1f} ms" for batch, seconds in sorted(measured.step_seconds.items()))
    console.print(f"measured here, {together}, median of {measured.rounds}: a step without exchange, by batch {sizes}")
    grads = ", ".join(f"{phase} {size / 1e6:.2f} MB" for phase, size in measured.gradient_bytes.items())
    console.print(f"gradients a step: {grads}; other exchanges a step: {measured.exchanges} (BatchNorm, facts)")
    if link:
        how = "as said" if given else f"measured over {link.devices} processes"
        speed = f"{link.bytes_per_second / 1e9:.3g} GB/s and {link.latency_seconds * 1e6:.0f} µs an exchange"
        console.print(f"link, {how}: {speed}; overlap with the step: {measured.overlap:.0%}")


def _print_table(
    console: Console,
    config: Config,
    measured: Measurement,
    link: Link | None,
    counts: list[int],
    batch: int,
    weak: bool,
) -> None:
    title = f"batch {batch} per device (weak scaling)" if weak else f"batch {batch} over all devices (strong scaling)"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    rates = list(dict.fromkeys(config.learner_of(name).lr for name in measured.networks))
    rules = ("lr, linear", "lr, sqrt") if weak else ()
    for heading in ("devices", "batch", "per device", "images/s", "efficiency", "images/day", *rules):
        table.add_column(heading, justify="right")
    one = predict(measured, link, 1, batch).images_per_second
    for count in counts:
        whole = batch * count if weak else batch
        if whole < count:
            continue
        seen = predict(measured, link, count, whole)
        row = [str(count), str(whole), f"{whole / count:g}", f"{seen.images_per_second:,.0f}"]
        row += [f"{seen.images_per_second / count / one:.0%}", f"{seen.images_per_second * SECONDS_A_DAY:.3g}"]
        if weak:
            row += [" / ".join(f"{lr * factor:.3g}" for lr in rates) for factor in (count, count**0.5)]
        table.add_row(*row)
    console.print(table)


def _say_where_it_ends(console: Console, measured: Measurement, link: Link | None, batch: int) -> None:
    end = stops_paying_at(measured, link, batch)
    if end is None:
        console.print(f"batch {batch} over all devices: each doubling still pays, up to one image per device")
    elif end == 1:
        console.print(f"batch {batch} over all devices: a second device does not pay (less than 10 % more images/s)")
    else:
        console.print(f"batch {batch} over all devices: from {end} devices on, doubling them adds less than 10 %")


def _say_error(console: Console, measured: Measurement) -> None:
    assert measured.checked
    errors = np.array([pair["predicted"] / pair["measured"] - 1 for pair in measured.checked])
    pairs = measured.checked
    predicted = float(np.median([pair["predicted"] for pair in pairs]))
    seen = float(np.median([pair["measured"] for pair in pairs]))
    console.print(
        f"checked: predicted {predicted:,.0f}, measured {seen:,.0f} images/s; error {predicted / seen - 1:+.0%} "
        f"(medians of {len(pairs)} turns; turn by turn {errors.min():+.0%} to {errors.max():+.0%})"
    )


def _whole(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise UserError(f"--devices {text}: is not a whole number of 1 or more")
    return int(text)


def parse_bandwidth(text: str) -> float:
    """`25GB/s`, `200Gbit/s` or `25e9` in bytes per second."""
    match = re.fullmatch(r"\s*([\d.]+(?:e\d+)?)\s*([kmgt]?)(b|bit|byte|bytes)?\s*(?:/\s*s|ps)?\s*", text.lower())
    try:
        if not match:
            raise ValueError
        value = float(match[1]) * UNITS[match[2]] / (8 if match[3] == "bit" else 1)
        if value <= 0:
            raise ValueError
    except ValueError:
        raise UserError(f"--bandwidth {text}: expected something like 25GB/s or 200Gbit/s") from None
    return value


def parse_seconds(text: str) -> float:
    """`20us`, `0.1ms` or `1e-5` in seconds."""
    match = re.fullmatch(r"\s*([\d.]+(?:e-?\d+)?)\s*(us|µs|ms|s|)\s*", text.lower())
    try:
        if not match:
            raise ValueError
        return float(match[1]) * {"us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "": 1.0}[match[2]]
    except ValueError:
        raise UserError(f"--latency {text}: expected something like 20us or 0.1ms") from None
