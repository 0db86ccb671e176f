"""`paceline doctor`: show this machine's hardware, and which Paceline features can run on it."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from paceline.benchmarking.loader_throughput import measure_loaders
from paceline.benchmarking.self_test import ALL_REDUCE_MEGABYTES, AllReduce, DeviceTest, ReplayCheck, measure_devices
from paceline.commands.configure import configure
from paceline.commands.verify import verify
from paceline.config.files import parse_assignments
from paceline.config.resolve import Config
from paceline.core.errors import UserError, missing
from paceline.core.files import read_json
from paceline.core.registry import is_installed, load_class, load_classes
from paceline.core.terminal import activity, open_screen
from paceline.core.types import SettingValue
from paceline.data.loader import Loader
from paceline.launch.tasks import Task, run_in_processes
from paceline.parallel.strategy import AUTO, Strategy, uses_one_device, why_unavailable
from paceline.parallel.world import check_devices
from paceline.runs.provenance import SELF_TEST, cache_file, identity, read_cached, store_cached, versions_and_hardware
from paceline.runs.recipe import resolve_settings
from paceline.training.compile import describe_kernel_cache
from paceline.training.stop import repeat_signal

SELF_TEST_RECIPE = "classification"
VERIFY_STEPS, VERIFY_TOLERANCE = 5, 1e-9


class Finding(NamedTuple):
    """Whether a strategy, loader, backend or precision works on this machine, with a reason or details."""

    kind: str
    name: str
    runs: bool
    reason: str  # why the feature does not work, or details such as the device


@dataclass(frozen=True)
class SelfTest:
    """The result of a self-test, as saved for this machine."""

    summary: str
    verified: bool
    devices: int
    all_reduce: AllReduce
    graph: ReplayCheck | None
    measured_at: str
    machine: Mapping[str, str]
    provenance: Mapping[str, str]

    @property
    def passed(self) -> bool:
        """Whether all tests that can run on this machine passed."""
        return self.verified and (self.graph is None or self.graph.passed)


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
    for finding in _findings():
        parts.add_row(finding.kind, finding.name, "yes" if finding.runs else "no", finding.reason)
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


def _findings() -> Iterator[Finding]:
    gpus = _num_gpus()
    yield from (_strategy(name, gpus) for name in load_classes("strategy", Strategy))
    yield from (_loader(name) for name in load_classes("loader", Loader))
    nccl = dist.is_nccl_available() and gpus > 0
    yield Finding("backend", "gloo", dist.is_gloo_available(), "any device")
    yield Finding("backend", "nccl", nccl, _count(gpus) if nccl else "needs GPUs")
    bf16 = gpus > 0 and torch.cuda.is_bf16_supported()
    yield Finding("precision", "bf16", True, "fast here" if bf16 else "works, but without hardware support")


def _strategy(name: str, gpus: int) -> Finding:
    strategy = load_class("strategy", name, Strategy)
    if unavailable := why_unavailable(strategy, on_gpus=bool(gpus)):
        return Finding("strategy", name, False, unavailable)
    if strategy.needs_processes:
        return Finding("strategy", name, True, f"{_count(gpus)}, nccl" if gpus else f"{os.cpu_count()} CPU cores, gloo")
    return Finding("strategy", name, True, _count(1 if uses_one_device(strategy) else gpus) if gpus else "CPU")


def _loader(name: str) -> Finding:
    loader = load_class("loader", name, Loader)
    if not is_installed(loader.package):
        return Finding("loader", name, False, missing(loader.package, loader.extra))
    return Finding("loader", name, True, loader.description)


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
    tested = _test_devices(config)
    summary = _summary(verified, devices, gpus, tested)
    result = SelfTest(
        summary,
        verified,
        devices,
        tested.all_reduce,
        tested.graph,
        measured_at=datetime.now(UTC).isoformat(timespec="seconds"),
        machine=identity(),
        provenance=versions_and_hardware(),
    )
    kept = store_cached(SELF_TEST, asdict(result))
    console.print(f"self-test: {summary}; {kept}", soft_wrap=True)
    return int(not result.passed)


def _strategies_to_verify(shares_a_gpu: bool) -> list[str]:
    """Return the single-device strategy and the strategies to compare with it.

    If processes share a GPU, only the default strategy for several devices is compared.
    """
    if shares_a_gpu:
        return [AUTO["one device"], AUTO["several"]]
    classes = load_classes("strategy", Strategy)
    comparable = [
        name
        for name, one in classes.items()
        if one.needs_processes and not one.why_not("parity") and is_installed(one.package)
    ]
    return [AUTO["one device"], *comparable]


def _test_devices(config: Config) -> DeviceTest:
    with tempfile.TemporaryDirectory(prefix="paceline-doctor-") as folder:
        path = Path(folder) / "tested.json"
        code = run_in_processes(Task.of(measure_devices, str(path)), config)
        repeat_signal(code)
        if code or not path.is_file():
            raise UserError(
                f"doctor --self-test: a process failed with exit code {code}; see its output above (nothing was saved)"
            )
        return DeviceTest.from_json(read_json(path))


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
