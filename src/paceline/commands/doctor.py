"""`paceline doctor`: what this machine has, what can run here, and why the rest cannot."""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from paceline.benchmarking.graph_check import check_replay
from paceline.benchmarking.loader_throughput import measure_loaders
from paceline.benchmarking.timing import measure
from paceline.commands.configure import configure
from paceline.commands.verify import verify
from paceline.config.files import parse_assignments
from paceline.config.resolve import Config
from paceline.core.errors import UserError, install_extra
from paceline.core.json_file import keep
from paceline.core.registry import names
from paceline.core.screen import open_screen
from paceline.launch.tasks import Task, run_in_processes
from paceline.parallel.world import check_devices, join
from paceline.runs.config import resolve_settings
from paceline.runs.machine_record import SELF_TEST, identity, kept_file, read_kept
from paceline.runs.provenance import versions_and_hardware
from paceline.training.stop import INTERRUPTED

ALL_REDUCE_MEGABYTES = 45  # the gradients of a ResNet-18
NEEDS = {"lightning": "lightning", "dali": "nvidia.dali"}  # what a strategy or loader needs besides torch
LOADS_BY = {"resident": "uint8 on the device", "workers": "processes that decode", "dali": "threads of DALI's own"}


def doctor_of_loaders(flags: Mapping[str, Any], assignments: Iterable[str]) -> int:
    """Measures what each loader gives of some data here; the flags are a run's."""
    layers = [("flag", flags), ("--set", parse_assignments(assignments))]
    settings = resolve_settings("doctor", layers)
    check_devices(settings)
    return measure_loaders(settings, open_screen())


def doctor(self_test: bool) -> int:
    """Prints one screen; with a self-test also verifies and times this machine's own devices."""
    console = open_screen()
    machine = Table(title="this machine", title_justify="left", show_header=False)
    for name, value in versions_and_hardware().items():
        machine.add_row(name, value)
    console.print(machine)
    parts = Table(title="what can run here", title_justify="left")
    for heading in ("kind", "name", "here", "why"):
        parts.add_column(heading)
    for kind, name, runs, why in _findings():
        parts.add_row(kind, name, "yes" if runs else "no", why)
    console.print(parts)
    if self_test:
        return _self_test(console)
    if kept := read_kept(SELF_TEST):
        console.print(f"last self-test: {kept['summary']} ({kept_file(SELF_TEST)})", soft_wrap=True)
    else:
        console.print("no self-test was kept here: paceline doctor --self-test")
    return 0


def _findings() -> Iterator[tuple[str, str, bool, str]]:
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    plural = "1 GPU" if gpus == 1 else f"{gpus} GPUs"
    for name in names("strategy"):
        if _is_missing(name):
            yield "strategy", name, False, f"package {NEEDS[name]} is not installed"
        elif name == "dp":
            yield "strategy", name, gpus > 0, plural if gpus else "needs GPUs; on a CPU it is the same as single"
        elif name == "single":
            yield "strategy", name, True, plural if gpus else "CPU"
        else:
            yield "strategy", name, True, f"{plural}, nccl" if gpus else f"{os.cpu_count()} CPU cores, gloo"
    for name in names("loader"):
        missing = _is_missing(name)
        why = install_extra(name) if missing else LOADS_BY.get(name, "")
        yield "loader", name, not missing, why
    nccl = dist.is_nccl_available() and gpus > 0
    yield "backend", "gloo", dist.is_gloo_available(), "any device"
    yield "backend", "nccl", nccl, plural if nccl else "needs GPUs"
    bf16 = gpus > 0 and torch.cuda.is_bf16_supported()
    yield "precision", "bf16", True, "fast here" if bf16 else "works, without hardware for it"


def _is_missing(name: str) -> bool:
    try:
        return name in NEEDS and find_spec(NEEDS[name]) is None
    except ModuleNotFoundError:  # of the package that it is inside of
        return True


def _self_test(console: Console) -> int:
    """Shows that strategies agree here, times an all-reduce and, on several GPUs, tries a captured step; keeps it."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    devices = max(2, gpus)
    small = {"devices": devices, "batch_size": str(16 * devices)}
    if gpus == 1:
        small["gpus"] = "0,0"  # two processes on the one GPU, over gloo
    config = configure("classification", small, small=True)
    verified = verify(config, ["single", "ddp", "lightning"] if "gpus" not in small else ["single", "ddp"], 5, 1e-9, "")
    with tempfile.TemporaryDirectory(prefix="paceline-doctor-") as folder:
        seen = Path(folder) / "seen.json"
        code = run_in_processes(Task.of(time_all_reduce, str(seen)), config)
        if code == INTERRUPTED:
            raise KeyboardInterrupt
        if code or not seen.is_file():
            raise UserError(f"doctor --self-test: its processes ended with exit code {code}, so nothing was kept")
        timing = json.loads(seen.read_text())
    graph = timing.pop("graph")
    summary = (
        f"verify {'passed' if verified == 0 else 'FAILED'} with {devices} processes; "
        f"all-reduce of {ALL_REDUCE_MEGABYTES} MB over {timing['backend']} {timing['milliseconds']:.1f} ms; "
        f"a captured step over several GPUs {_outcome(graph)}"
    )
    result = {"summary": summary, "verified": verified == 0, "devices": devices, "all_reduce": timing, "graph": graph}
    result |= {"when": time.strftime("%Y-%m-%d %H:%M:%S"), "machine": identity()}
    keep(kept_file(SELF_TEST), result | {"made_with": versions_and_hardware()})
    console.print(f"self-test: {summary}; kept in {kept_file(SELF_TEST)}", soft_wrap=True)
    return int(verified != 0 or bool(graph and not graph["passed"]))


def _outcome(graph: dict[str, Any] | None) -> str:
    if not graph:
        return "was not tried: it needs two GPUs"
    return f"passed ({graph['what']})" if graph["passed"] else f"FAILED ({graph['what']})"


def time_all_reduce(config: Config, path: str) -> None:
    """This process's part of the timed all-reduce and of the captured step; the first rank writes what it saw."""
    world = join(config.run, distributed=True)
    tensor = torch.ones(ALL_REDUCE_MEGABYTES * 2**20 // 4, device=world.device)
    timing = measure(lambda: dist.all_reduce(tensor), device=world.device, warmup=3, repeats=10)
    graph = check_replay(config, world) if world.backend == "nccl" else None
    if world.is_first:
        seen = {"milliseconds": timing.median * 1e3, "low": timing.low * 1e3, "high": timing.high * 1e3, "n": timing.n}
        Path(path).write_text(json.dumps(seen | {"backend": world.backend, "processes": world.size, "graph": graph}))
    world.wait_for_all()
    world.leave()
