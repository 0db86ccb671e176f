"""`paceline doctor`: show this machine's hardware, and which Paceline features can run on it."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from datetime import UTC, datetime

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from paceline.benchmarking.self_test import ALL_REDUCE_MEGABYTES, DeviceTest, measure_devices, measure_loaders
from paceline.benchmarking.step_ladder import measure_in_processes
from paceline.commands.configure import configure
from paceline.commands.verify import verify
from paceline.config.files import parse_assignments
from paceline.core.errors import missing
from paceline.core.registry import is_installed, load_classes
from paceline.core.terminal import activity, open_screen
from paceline.core.types import SettingValue
from paceline.data.loader import Loader
from paceline.launch.tasks import Task
from paceline.parallel.strategy import AUTO, Strategy, uses_one_device, why_unavailable
from paceline.parallel.world import check_devices
from paceline.runs.provenance import SELF_TEST, cache_file, identity, read_cached, store_cached, versions_and_hardware
from paceline.runs.recipe import resolve_settings
from paceline.training.compile import describe_kernel_cache

SELF_TEST_RECIPE = "classification"
VERIFY_STEPS, VERIFY_TOLERANCE = 5, 1e-9


def measure_loaders_here(flags: Mapping[str, SettingValue], assignments: Iterable[str]) -> int:
    """Measure the throughput of each loader on the data that the run settings select."""
    settings = resolve_settings("doctor", [("flag", flags), ("--set", parse_assignments(assignments))])
    check_devices(settings)
    return measure_loaders(settings, open_screen())


def doctor(self_test: bool) -> int:
    """Print this machine's hardware and what it can run; with `self_test`, also test its devices."""
    activity("reading the hardware and software versions")
    console = open_screen()
    machine = Table(title="this machine", title_justify="left", show_header=False)
    for name, value in versions_and_hardware().items():
        machine.add_row(name, value)
    console.print(machine)
    parts = Table("kind", "name", "here", "reason", title="what can run on this machine", title_justify="left")
    for kind, name, runs, reason in _findings():
        parts.add_row(kind, name, "yes" if runs else "no", reason)
    console.print(parts)
    console.print(describe_kernel_cache(), soft_wrap=True)
    if self_test:
        return _run_self_test(console)
    if cached := read_cached(SELF_TEST):
        console.print(f"last self-test: {cached['summary']} ({cache_file(SELF_TEST)})", soft_wrap=True)
    else:
        console.print(
            "To check that training on several devices gives the same weights as on one, and to time the exchange of "
            "gradients, run: paceline doctor --self-test",
            soft_wrap=True,
        )
    return 0


def _findings() -> Iterator[tuple[str, str, bool, str]]:
    """Yield kind, name and whether each feature works here, with the reason why not, or details such as the device."""
    gpus = _num_gpus()
    for name, strategy in load_classes("strategy", Strategy).items():
        obstacle = why_unavailable(strategy, on_gpus=bool(gpus))
        if strategy.needs_processes:
            devices = f"{_count(gpus)}, nccl" if gpus else f"{os.cpu_count()} CPU cores, gloo"
        else:
            devices = _count(1 if uses_one_device(strategy) else gpus) if gpus else "CPU"
        yield "strategy", name, not obstacle, obstacle or devices
    for name, loader in load_classes("loader", Loader).items():
        runs = is_installed(loader.package)
        yield "loader", name, runs, loader.description if runs else missing(loader.package, loader.extra)
    nccl = dist.is_nccl_available() and gpus > 0
    yield "backend", "gloo", dist.is_gloo_available(), "any device"
    yield "backend", "nccl", nccl, _count(gpus) if nccl else "needs GPUs"
    bf16 = gpus > 0 and torch.cuda.is_bf16_supported()
    yield "precision", "bf16", True, "fast here" if bf16 else "works, but without hardware support"


def _num_gpus() -> int:
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def _count(gpus: int) -> str:
    return "1 GPU" if gpus == 1 else f"{gpus} GPUs"


def _run_self_test(console: Console) -> int:
    """Verify strategies, time an all-reduce and, on several GPUs, test a CUDA graph; save the result."""
    gpus = _num_gpus()
    devices, shares_a_gpu = max(2, gpus), gpus == 1
    flags = {"devices": str(devices), "batch_size": str(16 * devices)}
    if shares_a_gpu:
        flags["gpus"] = "0,0"  # two processes share the only GPU and communicate over gloo
    config = configure(SELF_TEST_RECIPE, flags, small=True)
    verified = verify(config, _strategies_to_verify(shares_a_gpu), VERIFY_STEPS, VERIFY_TOLERANCE, "") == 0
    activity("timing an all-reduce")
    tested = DeviceTest.from_json(measure_in_processes(lambda path: Task.of(measure_devices, path), config))
    summary = _summary(verified, devices, gpus, tested)
    result = {"summary": summary, "verified": verified, "devices": devices, **asdict(tested)}
    result |= {"measured_at": datetime.now(UTC).isoformat(timespec="seconds")}
    result |= {"machine": identity(), "provenance": versions_and_hardware()}
    console.print(f"self-test: {summary}; {store_cached(SELF_TEST, result)}", soft_wrap=True)
    return int(not (verified and (tested.graph is None or tested.graph.passed)))


def _strategies_to_verify(shares_a_gpu: bool) -> list[str]:
    """Return the single-device strategy and the strategies to compare with it.

    If processes share a GPU, only the default strategy for several devices is compared.
    """
    if shares_a_gpu:
        return [AUTO["one device"], AUTO["several"]]
    classes = load_classes("strategy", Strategy).items()
    comparable = {name: one for name, one in classes if one.needs_processes and not one.why_not("parity")}
    return [AUTO["one device"], *(name for name, one in comparable.items() if is_installed(one.package))]


def _summary(verified: bool, devices: int, gpus: int, tested: DeviceTest) -> str:
    """Describe the result; on a machine without several GPUs, leave out what does not apply to it."""
    where = f"on {devices} GPUs" if gpus > 1 else f"in {devices} processes on {'one GPU' if gpus else 'the CPU'}"
    weights = "gives the same weights" if verified else "DOES NOT give the same weights"
    reduced = tested.all_reduce
    parts = [
        f"training in one process and {where} {weights}",
        f"exchanging {ALL_REDUCE_MEGABYTES} MB of gradients takes {reduced.milliseconds:.1f} ms ({reduced.backend})",
    ]
    if tested.graph:
        outcome = "works" if tested.graph.passed else "FAILED"
        parts.append(f"CUDA graph on several GPUs {outcome} ({tested.graph.result})")
    return "; ".join(parts)
