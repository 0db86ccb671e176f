"""`paceline plan`: predict the speed of a recipe on more devices, or the memory that it needs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from rich import box
from rich.console import Console
from rich.table import Table

from paceline.benchmarking.scaling import (
    Link,
    LinkOverride,
    Measurement,
    measure_scaling,
    parse_amount,
    predict,
)
from paceline.benchmarking.step_ladder import measure_in_processes
from paceline.commands.configure import configure
from paceline.commands.options import PlanOptions
from paceline.compare.training import given_threads
from paceline.config.flags import PLAN_DEVICES
from paceline.config.resolve import Config
from paceline.config.settings import split_batch
from paceline.core.errors import UserError
from paceline.core.ordered_map import num_cores
from paceline.core.registry import load_classes
from paceline.core.terminal import end_activity, open_screen
from paceline.core.types import SettingValue
from paceline.launch.tasks import Task
from paceline.parallel.strategy import AUTO, Strategy, uses_one_device
from paceline.parallel.world import uses_cuda
from paceline.training.memory import GIB, USABLE, Forecast, Kind, check_step_fits, forecast, gib

WIDEST = 1000  # width in characters, more than any table that a command prints


def print_table(
    console: Console, title: str, headings: Sequence[str], rows: Sequence[Sequence[str]], *, num_texts: int = 0
) -> None:
    """Print a table in its full width, even on a narrower terminal, so that no number is cut off.

    The first `num_texts` columns contain text instead of numbers, and are aligned to the left.
    """
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 0, 0, 1))
    for number, heading in enumerate(headings):
        table.add_column(heading, justify="left" if number < num_texts else "right")
    for row in rows:
        table.add_row(*row)
    table.width = console.measure(table, options=console.options.update_width(WIDEST)).maximum
    console.print(table, soft_wrap=True)


UNITS = {"B": 1, "MB": 10**6, "GB": 10**9, "TB": 10**12, "MiB": 2**20, "GiB": GIB, "TiB": 2**40}
SHOWN = (Kind.WEIGHTS, Kind.GRADIENTS, Kind.OPTIMIZER, Kind.EMA, Kind.ACTIVATIONS)


class Row(NamedTuple):
    """One strategy on a number of devices."""

    name: str
    strategy: type[Strategy]
    devices: int


def _plan_memory(config: Config, counts: Sequence[int], per_node: int, device_memory: str) -> int:
    """Print the memory of each strategy on each number of devices, computed without training or a GPU.

    `per_node` is the number of devices per host, which limits strategies that run in one process.
    """
    if device_memory:
        device_bytes = int(parse_amount("--device-memory", device_memory, UNITS, "24GiB or 80GB"))
    else:
        device_bytes = torch.cuda.get_device_properties(0).total_memory if torch.cuda.is_available() else 0
    predicted = forecast(config, device_bytes)
    end_activity()
    console = open_screen(soft_wrap=True)
    rows = list(_rows(predicted, counts, per_node))
    _print_memory(console, predicted, rows, device_bytes)
    _print_notes(console, predicted, rows, device_bytes)
    if too_many := [devices for devices in counts if not predicted.can_divide(devices)]:
        batch = config.run.batch_size
        console.print(f"{too_many[0]} or more devices: not shown, because --batch-size {batch} is too small")
    if device_bytes:
        _check_fits(predicted, rows, device_bytes, device_memory)
    return 0


def _rows(found: Forecast, counts: Sequence[int], per_node: int) -> Iterator[Row]:
    """Yield each strategy with each number of devices that it can use and that the batch can be divided among."""
    strategies = sorted(load_classes("strategy", Strategy).items(), key=lambda item: item[1].complexity)
    for name, strategy in strategies:
        limit = 1 if uses_one_device(strategy) else max(counts) if strategy.needs_processes else per_node
        for devices in counts:
            if devices <= limit and found.can_divide(devices):
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
        sizes = [memory.bytes.get(kind, 0) for kind in SHOWN]
        cells = [f"{size / UNITS[unit]:,.2f}" for size in (*sizes, memory.total - sum(sizes), memory.total)]
        lines.append([row.name, str(row.devices), str(samples), *cells])
        if device_bytes:
            lines[-1] += [_largest(found, row, device_bytes, recompute) for recompute in (False, True)]
    print_table(console, title, headings, lines, num_texts=1)


def _largest(found: Forecast, row: Row, device_bytes: int, recompute: bool) -> str:
    if recompute and not found.can_recompute(row.strategy):
        return "–"
    return f"{found.largest_batch(row.strategy, row.devices, device_bytes, recompute=recompute):,}"


def _print_notes(console: Console, found: Forecast, rows: Sequence[Row], device_bytes: int) -> None:
    memory = found.memory(Strategy, 1, found.samples_per_device(1))
    console.print(f"peak on one device: in phase {memory.phase!r}, which updates {memory.network!r}")
    if recomputing := dict.fromkeys(row.name for row in rows if found.recomputes(row.strategy, row.devices)):
        console.print(f"activations: recomputed in the backward pass under {', '.join(recomputing)}")
    console.print(
        "other: the batch, samples kept on the device, frozen networks, buckets, gathered weights, CUDA graphs; "
        "not included: the CUDA context, cuDNN workspaces and fragmentation"
    )
    if device_bytes:
        console.print(
            f"largest batch: fits in {USABLE:.0%} of {gib(device_bytes)} GiB, with activations stored, "
            "and recomputed (--set checkpoint_activations=on)"
        )
    else:
        console.print("add --device-memory, e.g. --device-memory 24GiB, to find the largest batch that fits")


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


SECONDS_PER_DAY = 86_400


def plan(
    recipe: str,
    flags: Mapping[str, SettingValue],
    options: PlanOptions,
    *,
    config_file: str = "",
    assignments: Sequence[str] = (),
) -> int:
    """Measure steps on this machine and print the predicted speed; with `check`, also measure the actual speed."""
    text = str(flags.get("devices", PLAN_DEVICES))
    if not text.isdecimal() or int(text) < 1:
        raise UserError(f"--devices {text}: must be a whole number >= 1")
    devices = int(text)
    if devices % options.nodes:
        raise UserError(f"--devices {devices}: must be a multiple of --nodes {options.nodes}")
    per_node = devices // options.nodes
    counts = [*(2**power for power in range(devices.bit_length()) if 2**power < devices), devices]
    of_memory = options.memory or bool(options.device_memory)
    given = {"--bandwidth": options.bandwidth, "--latency": options.latency}
    for flag in (flag for flag, value in {**given, "--check": options.check}.items() if value and of_memory):
        raise UserError(f"{flag}: predicts the speed, so it cannot be combined with --memory; leave one out")
    here = {name: value for name, value in flags.items() if name != "devices"}
    config = configure(recipe, here, config_file=config_file, assignments=assignments, elsewhere=of_memory)
    if of_memory:
        return _plan_memory(config, counts, per_node, options.device_memory)
    batch = split_batch(config.run.batch_size, devices, config.run.accumulate)
    override = LinkOverride.parse(options.bandwidth, options.latency)
    processes = _processes_here(config, per_node)
    if not options.bandwidth and (processes == 1 or options.nodes > 1) and devices > 1:
        what = f"--nodes {options.nodes}" if options.nodes > 1 else f"--devices {devices}"
        raise UserError(
            f"{what}: the link between devices cannot be measured on this machine; specify it, e.g. --bandwidth 25GB/s"
        )
    if options.check and processes != devices:
        raise UserError(
            f"--check: only {processes} of {devices} devices can be measured on this machine; reduce --devices"
        )
    for flag, value in given.items():
        if options.check and value:
            raise UserError(f"{flag} {value}: cannot be combined with --check, which measures the link; leave one out")
    sizes = sorted({max(1, batch // n) for n in counts}, reverse=True)
    if not uses_cuda(config.run):
        check_step_fits(config.with_run(devices=1, strategy=AUTO["one device"], batch_size=str(sizes[0])), processes)
    config = config.with_run(devices=processes, strategy=AUTO["several"], batch_size=str(batch))
    content = measure_in_processes(lambda path: Task.of(measure_scaling, path, sizes, options.check), config)
    measured = Measurement.from_json(content)
    link = override.apply(measured.link) if devices > 1 else None
    assert link is not None or devices == 1
    console = open_screen(soft_wrap=True)
    _print_measurement(console, measured, processes, devices)
    if link:
        console.print(
            f"link: {override.describe(link)}; overlap between communication and computation: {measured.overlap:.0%}"
        )
    elif options.bandwidth or options.latency:
        console.print("link: not used, because a single device does not communicate")
    for weak in (False, True) if devices > 1 else (False,):
        _print_speeds(console, measured, link, counts, batch, weak)
    if options.check:
        _print_error(console, measured)
    return 0


def _processes_here(config: Config, per_node: int) -> int:
    """Return how many devices to measure on this machine: the number per host, or fewer if the machine has fewer."""
    if uses_cuda(config.run):
        return min(per_node, torch.cuda.device_count())
    return max(1, min(per_node, num_cores() // given_threads()))


def _print_measurement(console: Console, measured: Measurement, processes: int, devices: int) -> None:
    threads = f" ({measured.threads} thread{'s' * (measured.threads > 1)})" if measured.threads else ""
    console.print(f"step time by batch size, median of {measured.rounds} measurements on this machine:")
    console.print(f"  one device alone{threads}: {_by_batch(measured.alone_seconds)}")
    if devices > 1:
        together = f"{processes} processes in parallel" if processes > 1 else "one process"
        console.print(
            f"  one of several devices ({together}), excluding communication: {_by_batch(measured.step_seconds)}"
        )
    grads = ", ".join(f"{phase} {size / 1e6:.2f} MB" for phase, size in measured.gradient_bytes.items())
    console.print(
        f"gradients per step: {grads}; other collective operations per step: {measured.exchanges} "
        "(for BatchNorm and for values passed between phases)"
    )


def _by_batch(seconds: Mapping[int, float]) -> str:
    return ", ".join(f"{batch}: {spent * 1e3:.1f} ms" for batch, spent in sorted(seconds.items()))


def _print_speeds(
    console: Console, measured: Measurement, link: Link | None, counts: Sequence[int], batch: int, weak: bool
) -> None:
    title = f"batch {batch} per device (weak scaling)" if weak else f"batch {batch} across all devices (strong scaling)"
    headings = ("devices", "batch" if weak else "per device", "images/s", "efficiency", "images/day")
    rows = []
    alone = predict(measured, link, 1, batch).images_per_second
    for count in counts:
        whole = batch * count if weak else batch
        speed = predict(measured, link, count, whole).images_per_second
        row = [str(count), str(whole) if weak else f"{whole / count:g}", f"{speed:,.0f}"]
        rows.append([*row, f"{speed / count / alone:.0%}", f"{speed * SECONDS_PER_DAY:.3g}"])
    print_table(console, title, headings, rows)


def _print_error(console: Console, measured: Measurement) -> None:
    turns = measured.checked
    errors = np.array([turn.predicted / turn.measured - 1 for turn in turns])
    predicted = float(np.median([turn.predicted for turn in turns]))
    seen = float(np.median([turn.measured for turn in turns]))
    console.print(
        f"checked: predicted {predicted:,.0f}, measured {seen:,.0f} images/s; error {predicted / seen - 1:+.0%} "
        f"(medians of {len(turns)} rounds; individual rounds {errors.min():+.0%} to {errors.max():+.0%})"
    )
