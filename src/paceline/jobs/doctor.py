"""`paceline doctor`: what this machine has, what can run here, and why the rest cannot."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from paceline.config import Config
from paceline.engine.timing import measure
from paceline.jobs.configure import configure
from paceline.jobs.verify import verify
from paceline.jobs.worker import run_in_processes
from paceline.monitor.made_with import versions_and_hardware
from paceline.parallel.environment import join
from paceline.registry import names

ALL_REDUCE_MEGABYTES = 45  # the gradients of a ResNet-18
NEEDS = {"lightning": "lightning"}  # what a strategy or loader needs besides torch


def doctor(self_test: bool) -> int:
    """Prints one screen; with a self-test also verifies and times this machine's own devices."""
    console = Console(highlight=False)
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
    kept = result_file()
    if self_test:
        return _self_test(console)
    if kept.is_file():
        console.print(f"last self-test: {json.loads(kept.read_text())['summary']} ({kept})")
    else:
        console.print("no self-test was kept here: paceline doctor --self-test")
    return 0


def _findings() -> Iterator[tuple[str, str, bool, str]]:
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    plural = "1 GPU" if gpus == 1 else f"{gpus} GPUs"
    for name in names("strategy"):
        missing = NEEDS.get(name) and find_spec(NEEDS[name]) is None
        if missing:
            yield "strategy", name, False, f"package {NEEDS[name]} is not installed"
        elif name == "dp":
            yield "strategy", name, gpus > 0, plural if gpus else "needs GPUs; on a CPU it is the same as single"
        elif name == "single":
            yield "strategy", name, True, plural if gpus else "CPU"
        else:
            yield "strategy", name, True, f"{plural}, nccl" if gpus else f"{os.cpu_count()} CPU cores, gloo"
    for name in names("loader"):
        yield "loader", name, True, "uint8 on the device" if name == "resident" else "processes that decode"
    nccl = dist.is_nccl_available() and gpus > 0
    yield "backend", "gloo", dist.is_gloo_available(), "any device"
    yield "backend", "nccl", nccl, plural if nccl else "needs GPUs"
    bf16 = gpus > 0 and torch.cuda.is_bf16_supported()
    yield "precision", "bf16", True, "fast here" if bf16 else "works, without hardware for it"


def _self_test(console: Console) -> int:
    devices = max(2, torch.cuda.device_count())
    small = {"devices": devices, "batch_size": "32"}
    if torch.cuda.is_available() and torch.cuda.device_count() == 1:
        small["gpus"] = "0,0"  # two processes on the one GPU, over gloo
    config = configure("classification", small, small=True)
    verified = verify(config, ["single", "ddp", "lightning"] if "gpus" not in small else ["single", "ddp"], 5, 1e-9, "")
    kept = result_file()
    kept.parent.mkdir(parents=True, exist_ok=True)
    code = run_in_processes("doctor", config, str(kept))
    if code:
        return code
    timing = json.loads(kept.read_text())
    summary = (
        f"verify {'passed' if verified == 0 else 'FAILED'} with {devices} processes; "
        f"all-reduce of {ALL_REDUCE_MEGABYTES} MB over {timing['backend']} {timing['milliseconds']:.1f} ms"
    )
    result = {"summary": summary, "verified": verified == 0, "devices": devices, "all_reduce": timing}
    result["when"] = time.strftime("%Y-%m-%d %H:%M:%S")
    kept.write_text(json.dumps(result | {"made_with": versions_and_hardware()}, indent=1))
    console.print(f"self-test: {summary}; kept in {kept}")
    return verified


def doctor_here(config: Config, path: str) -> None:
    """This process's part of the timed all-reduce; the first rank writes what it saw."""
    world = join(config.run, distributed=True)
    tensor = torch.ones(ALL_REDUCE_MEGABYTES * 2**20 // 4, device=world.device)
    timing = measure(lambda: dist.all_reduce(tensor), device=world.device, warmup=3, repeats=10)
    if world.is_first:
        seen = {"milliseconds": timing.median * 1e3, "low": timing.low * 1e3, "high": timing.high * 1e3, "n": timing.n}
        Path(path).write_text(json.dumps(seen | {"backend": world.backend, "processes": world.size}))
    world.wait_for_all()
    world.leave()


def result_file() -> Path:
    """Where this machine's last self-test is kept."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "paceline" / "self-test.json"
