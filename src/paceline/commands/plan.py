"""`paceline plan`: how fast a recipe will be on more devices, predicted from a short measurement on this machine's."""

from __future__ import annotations

import json
import os
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

from paceline.benchmarking.link_override import SaidLink
from paceline.benchmarking.scaling_forecast import Link, Measurement, predict, stops_paying_at
from paceline.benchmarking.scaling_probe import measure_scaling
from paceline.commands.configure import configure
from paceline.config.resolve import Config
from paceline.config.spans import split_batch
from paceline.core.errors import UserError
from paceline.core.screen import open_screen
from paceline.launch.tasks import Task, run_in_processes
from paceline.parallel.world import uses_cuda
from paceline.training.stop import INTERRUPTED

SECONDS_A_DAY = 86_400
WIDEST = 1000  # columns: more than a table here has


@dataclass(frozen=True)
class Options:
    """What a person asked for besides the settings of a run."""

    nodes: int = 1
    bandwidth: str = ""
    latency: str = ""
    check: bool = False


def plan(
    recipe: str,
    flags: dict[str, Any],
    options: Options,
    *,
    config_file: str = "",
    assignments: Sequence[str] = (),
) -> int:
    """Measures, predicts and prints; with `check` also measures what was predicted."""
    flags = dict(flags)
    devices = _whole(str(flags.pop("devices", "8")))
    config = configure(recipe, flags, config_file=config_file, assignments=assignments)
    batch = split_batch(config.run.batch_size, devices, config.run.accumulate)
    if devices % options.nodes:
        raise UserError(f"--nodes {options.nodes}: does not divide --devices {devices}")
    said = SaidLink.parse(options.bandwidth, options.latency)
    processes = _processes_here(config, devices // options.nodes)
    if not options.bandwidth and (processes == 1 or options.nodes > 1) and devices > 1:
        what = f"--nodes {options.nodes}" if options.nodes > 1 else f"--devices {devices}"
        raise UserError(f"{what}: the link between devices cannot be measured here; say it, like --bandwidth 25GB/s")
    if options.check and processes != devices:
        raise UserError(f"--check: only as many devices as this machine has can be measured, here {processes}")
    for flag, value in (("--bandwidth", options.bandwidth), ("--latency", options.latency)):
        if options.check and value:
            raise UserError(f"{flag} {value}: --check measures over the link that is here; leave out one of the two")
    counts = _counts(devices)
    sizes = sorted({max(1, batch // n) for n in counts}, reverse=True)
    config = config.with_run(devices=processes, strategy="ddp", batch_size=str(batch))
    measured = _measure(config, sizes, options.check)
    link = said.beside(measured.link) if devices > 1 else None
    assert link is not None or devices == 1
    console = open_screen(soft_wrap=True)
    _say_what_was_measured(console, measured, processes, devices)
    if link:
        console.print(f"link: {said.describe(link)}; overlap with the step: {measured.overlap:.0%}")
    elif options.bandwidth or options.latency:
        console.print("link: not used, since one device exchanges nothing")
    _print_table(console, config, measured, link, counts, batch, weak=False)
    if devices > 1:
        _print_table(console, config, measured, link, counts, batch, weak=True)
        _say_where_it_ends(console, measured, link, batch)
    if options.check:
        _say_error(console, measured)
    return 0


def _processes_here(config: Config, per_node: int) -> int:
    """How many of a machine's devices can be measured at once here."""
    if uses_cuda(config.run):
        return min(per_node, torch.cuda.device_count())
    cores = len(os.sched_getaffinity(0))
    return max(1, min(per_node, cores // _threads_each()))


def _threads_each() -> int:
    """As the environment says; of a list, one number for each nested level, the outermost is meant."""
    said = os.environ.get("OMP_NUM_THREADS", "1")
    first = said.split(",")[0].strip()
    if not first.isdecimal() or int(first) < 1:
        raise UserError(f"OMP_NUM_THREADS={said}: is no number of threads; set it to one like 1, or unset it")
    return int(first)


def _measure(config: Config, sizes: Sequence[int], check: bool) -> Measurement:
    with tempfile.TemporaryDirectory(prefix="paceline-plan-") as folder:
        path = Path(folder) / "measured.json"
        code = run_in_processes(Task.of(measure_scaling, str(path), list(sizes), check), config)
        if code == INTERRUPTED:
            raise KeyboardInterrupt
        if code or not path.is_file():
            raise UserError(f"the measurement ended with exit code {code}")
        return Measurement.from_dict(json.loads(path.read_text()))


def _counts(devices: int) -> list[int]:
    """1, 2, 4 … up to the devices that were asked for."""
    counts = [2**power for power in range(devices.bit_length()) if 2**power < devices]
    return [*counts, devices]


def _say_what_was_measured(console: Console, measured: Measurement, processes: int, devices: int) -> None:
    threads = f" of {measured.threads} thread{'s' * (measured.threads > 1)}" if measured.threads else ""
    console.print(f"measured here, median of {measured.rounds}, a step by batch:")
    console.print(f"  one device{threads} alone: {_by_batch(measured.alone_seconds)}")
    if devices > 1:
        together = f"{processes} at once" if processes > 1 else "one process"
        console.print(f"  one of several, {together}, without exchange: {_by_batch(measured.step_seconds)}")
    grads = ", ".join(f"{phase} {size / 1e6:.2f} MB" for phase, size in measured.gradient_bytes.items())
    console.print(f"gradients a step: {grads}; other exchanges a step: {measured.exchanges} (BatchNorm, facts)")


def _by_batch(seconds: dict[int, float]) -> str:
    return ", ".join(f"{batch}: {spent * 1e3:.1f} ms" for batch, spent in sorted(seconds.items()))


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
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 0, 0, 1))
    rates = list(dict.fromkeys(config.learner_of(name).lr for name in measured.networks))
    rules = ("lr, linear", "lr, sqrt") if weak else ()
    for heading in ("devices", "batch" if weak else "per device", "images/s", "efficiency", "images/day", *rules):
        table.add_column(heading, justify="right")
    one = predict(measured, link, 1, batch).images_per_second
    for count in counts:
        whole = batch * count if weak else batch
        seen = predict(measured, link, count, whole)
        row = [str(count), str(whole) if weak else f"{whole / count:g}", f"{seen.images_per_second:,.0f}"]
        row += [f"{seen.images_per_second / count / one:.0%}", f"{seen.images_per_second * SECONDS_A_DAY:.3g}"]
        if weak:
            row += ["\n".join(f"{lr * factor:.3g}" for lr in rates) for factor in (count, count**0.5)]
        table.add_row(*row)
    # At its own width, whatever the terminal's: a number that is cut is none.
    table.width = console.measure(table, options=console.options.update_width(WIDEST)).maximum
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
