"""`paceline plan`: predict the speed of a recipe on more devices from a short measurement on this machine."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from rich.console import Console

from paceline.benchmarking.scaling_forecast import Link, LinkOverride, Measurement, max_useful_devices, predict
from paceline.benchmarking.scaling_probe import measure_scaling
from paceline.commands.configure import configure
from paceline.commands.full_width_table import print_table
from paceline.commands.plan_memory import plan_memory
from paceline.config.command_settings import PLAN_DEVICES
from paceline.config.resolve import Config
from paceline.config.spans import split_batch
from paceline.core.errors import UserError
from paceline.core.ordered_map import num_cores
from paceline.core.screen import open_screen
from paceline.core.small_files import read_json
from paceline.core.types import SettingValue
from paceline.launch.tasks import Task, run_in_processes
from paceline.parallel.strategy import AUTO
from paceline.parallel.world import uses_cuda
from paceline.training.memory_advice import check_step_fits
from paceline.training.stop import repeat_signal

SECONDS_PER_DAY = 86_400


@dataclass(frozen=True)
class Options:
    """Command-line options, apart from run settings."""

    nodes: int = 1
    bandwidth: str = ""
    latency: str = ""
    check: bool = False
    memory: bool = False
    device_memory: str = ""


def plan(
    recipe: str,
    flags: Mapping[str, SettingValue],
    options: Options,
    *,
    config_file: str = "",
    assignments: Sequence[str] = (),
) -> int:
    """Measure steps on this machine and print the predicted speed; with `check`, also measure the actual speed."""
    devices = _parse_devices(str(flags.get("devices", PLAN_DEVICES)))
    if options.memory or options.device_memory:
        _check_memory_options(options)
        return plan_memory(
            recipe,
            flags,
            _counts(devices),
            _devices_per_node(devices, options.nodes),
            options.device_memory,
            config_file=config_file,
            assignments=assignments,
        )
    here = {name: value for name, value in flags.items() if name != "devices"}
    config = configure(recipe, here, config_file=config_file, assignments=assignments)
    batch = split_batch(config.run.batch_size, devices, config.run.accumulate)
    override = LinkOverride.parse(options.bandwidth, options.latency)
    processes = _processes_here(config, devices, options.nodes)
    _check_link(options, devices, processes)
    counts = _counts(devices)
    sizes = sorted({max(1, batch // n) for n in counts}, reverse=True)
    if not uses_cuda(config.run):
        check_step_fits(config.with_run(devices=1, strategy=AUTO["one device"], batch_size=str(sizes[0])), processes)
    config = config.with_run(devices=processes, strategy=AUTO["several"], batch_size=str(batch))
    measured = _measure(config, sizes, options.check)
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
    _print_speeds(console, config, measured, link, counts, batch, weak=False)
    if devices > 1:
        _print_speeds(console, config, measured, link, counts, batch, weak=True)
        _print_limit(console, measured, link, batch)
    if options.check:
        _print_error(console, measured)
    return 0


def _check_memory_options(options: Options) -> None:
    """Raise UserError for options of the speed prediction, which the memory forecast does not use."""
    for flag, value in (("--bandwidth", options.bandwidth), ("--latency", options.latency), ("--check", options.check)):
        if value:
            raise UserError(f"{flag}: predicts the speed, so it cannot be combined with --memory; leave one out")


def _parse_devices(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise UserError(f"--devices {text}: must be a whole number >= 1")
    return int(text)


def _devices_per_node(devices: int, nodes: int) -> int:
    if devices % nodes:
        raise UserError(f"--devices {devices}: must be a multiple of --nodes {nodes}")
    return devices // nodes


def _processes_here(config: Config, devices: int, nodes: int) -> int:
    """Return how many devices to measure on this machine: the number per host, or fewer if the machine has fewer."""
    per_node = _devices_per_node(devices, nodes)
    if uses_cuda(config.run):
        return min(per_node, torch.cuda.device_count())
    cores = num_cores()
    return max(1, min(per_node, cores // _threads_per_process()))


def _threads_per_process() -> int:
    """Return the value of OMP_NUM_THREADS, or its first number if it is a list with one number per nesting level."""
    text = os.environ.get("OMP_NUM_THREADS", "1")
    first = text.split(",")[0].strip()
    if not first.isdecimal() or int(first) < 1:
        raise UserError(
            f"OMP_NUM_THREADS={text}: not a valid number of threads; set it to a number like 1, or unset it"
        )
    return int(first)


def _check_link(options: Options, devices: int, processes: int) -> None:
    """Raise UserError if the link between devices must be specified, or if `--check` is not possible."""
    if not options.bandwidth and (processes == 1 or options.nodes > 1) and devices > 1:
        what = f"--nodes {options.nodes}" if options.nodes > 1 else f"--devices {devices}"
        raise UserError(
            f"{what}: the link between devices cannot be measured on this machine; specify it, e.g. --bandwidth 25GB/s"
        )
    if options.check and processes != devices:
        raise UserError(
            f"--check: only {processes} of {devices} devices can be measured on this machine; reduce --devices"
        )
    for flag, value in (("--bandwidth", options.bandwidth), ("--latency", options.latency)):
        if options.check and value:
            raise UserError(f"{flag} {value}: cannot be combined with --check, which measures the link; leave one out")


def _counts(devices: int) -> list[int]:
    """Return the powers of two below `devices`, then `devices` itself."""
    counts = [2**power for power in range(devices.bit_length()) if 2**power < devices]
    return [*counts, devices]


def _measure(config: Config, sizes: Sequence[int], check: bool) -> Measurement:
    with tempfile.TemporaryDirectory(prefix="paceline-plan-") as folder:
        path = Path(folder) / "measured.json"
        code = run_in_processes(Task.of(measure_scaling, str(path), list(sizes), check), config)
        repeat_signal(code)
        if code or not path.is_file():
            raise UserError(f"plan: the measurement failed with exit code {code}; see the output above")
        return Measurement.from_json(read_json(path))


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
    console: Console,
    config: Config,
    measured: Measurement,
    link: Link | None,
    counts: Sequence[int],
    batch: int,
    weak: bool,
) -> None:
    title = f"batch {batch} per device (weak scaling)" if weak else f"batch {batch} across all devices (strong scaling)"
    rates = list(dict.fromkeys(config.learner_of(name).lr for name in measured.networks))
    rules = ("lr, linear", "lr, sqrt") if weak else ()
    headings = ("devices", "batch" if weak else "per device", "images/s", "efficiency", "images/day", *rules)
    rows = []
    one = predict(measured, link, 1, batch).images_per_second
    for count in counts:
        whole = batch * count if weak else batch
        speed = predict(measured, link, count, whole).images_per_second
        row = [str(count), str(whole) if weak else f"{whole / count:g}", f"{speed:,.0f}"]
        row += [f"{speed / count / one:.0%}", f"{speed * SECONDS_PER_DAY:.3g}"]
        if weak:
            row += ["\n".join(f"{lr * factor:.3g}" for lr in rates) for factor in (count, count**0.5)]
        rows.append(row)
    print_table(console, title, headings, rows)


def _print_limit(console: Console, measured: Measurement, link: Link | None, batch: int) -> None:
    end = max_useful_devices(measured, link, batch)
    if end is None:
        console.print(
            f"batch {batch} across all devices: each doubling of the device count adds at least 10 % to images/s, "
            "even with one image per device"
        )
    elif end == 1:
        console.print(f"batch {batch} across all devices: a second device adds less than 10 % to images/s")
    else:
        console.print(
            f"batch {batch} across all devices: doubling the device count beyond {end} adds less than 10 % to images/s"
        )


def _print_error(console: Console, measured: Measurement) -> None:
    turns = measured.checked
    errors = np.array([turn.predicted / turn.measured - 1 for turn in turns])
    predicted = float(np.median([turn.predicted for turn in turns]))
    seen = float(np.median([turn.measured for turn in turns]))
    console.print(
        f"checked: predicted {predicted:,.0f}, measured {seen:,.0f} images/s; error {predicted / seen - 1:+.0%} "
        f"(medians of {len(turns)} rounds; individual rounds {errors.min():+.0%} to {errors.max():+.0%})"
    )
