"""The versions and hardware of a run, and what was measured on this machine."""

from __future__ import annotations

import os
import platform
import subprocess
from collections import Counter
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from paceline.core.files import read_json, user_cache, write_json
from paceline.core.host import read_lines
from paceline.core.ordered_map import num_cores


def versions_and_hardware() -> dict[str, str]:
    """Return versions and hardware by name, omitting what this machine does not have."""
    found = {package: _version(package) for package in ("paceline", "torch", "torchvision", "lightning")}
    found |= {
        "python": platform.python_version(),
        "cpu": _cpu_model(),
        "cores": str(num_cores()),
        "threads": str(torch.get_num_threads()),  # per process
        "memory": f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.0f} GiB",
        **describe_gpus(),
        "git_commit": _git_commit(),
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    return {name: value for name, value in found.items() if value}


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _cpu_model() -> str:
    lines = read_lines(Path("/proc/cpuinfo"))
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor() or platform.machine()


def describe_gpus() -> dict[str, str]:
    """Describe the machine's GPUs with NVML, since torch would allocate memory on each of them."""
    try:
        import pynvml

        pynvml.nvmlInit()
        gpus = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
        names = Counter(_text(pynvml.nvmlDeviceGetName(gpu)) for gpu in gpus)
        driver = _text(pynvml.nvmlSystemGetDriverVersion())
    except Exception:  # pynvml, the driver or a GPU is missing
        return {}
    described = ", ".join(f"{count} × {name}" for name, count in names.items())
    return {"gpus": described, "driver": driver, "cuda": torch.version.cuda or ""}


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def _git_commit() -> str:
    """Return the Git commit of the current folder, and whether tracked files have changed."""
    commit = _git("rev-parse", "HEAD")
    return f"{commit} with changes" if commit and _git("status", "--porcelain", "--untracked-files=no") else commit


def _git(*arguments: str) -> str:
    try:
        answer = subprocess.run(["git", *arguments], capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return answer.stdout.strip() if answer.returncode == 0 else ""


SELF_TEST = "self-test.json"
HOW_TO_TEST = "run `paceline doctor --self-test`"


def cache_file(name: str) -> Path:
    """Return the path of a file in Paceline's cache folder."""
    return user_cache() / name


def read_cached(name: str) -> Mapping[str, Any]:
    """Return a saved result; empty if it is missing or damaged."""
    return read_json(cache_file(name))


def store_cached(name: str, content: object) -> str:
    """Save a result; return where, or why it could not be saved."""
    try:
        write_json(cache_file(name), content)
    except OSError as error:
        return f"not saved ({cache_file(name)}: {error.strerror}), so later runs cannot use it"
    return f"saved to {cache_file(name)}"


def identity() -> dict[str, str]:
    """Return the host, GPUs, driver and torch version for which a saved result is valid."""
    gpus = describe_gpus()
    return {
        "host": platform.node(),
        "gpus": gpus.get("gpus", ""),
        "driver": gpus.get("driver", ""),
        "torch": str(torch.__version__),
    }


def graph_obstacle(processes: int, hosts: int) -> str:
    """Return why this machine cannot capture a step on several GPUs as a CUDA graph; empty if the self-test passed."""
    if hosts > 1:
        return "CUDA graphs are untested across several hosts"
    cached = read_cached(SELF_TEST)
    try:
        machine, verified, graph = cached["machine"], cached["verified"], cached["graph"]
        tested = (graph["passed"], graph["result"], graph["processes"]) if graph else None
        changed = [(name, machine.get(name, ""), now) for name, now in identity().items() if machine.get(name) != now]
    except (KeyError, TypeError, AttributeError):
        return f"CUDA graphs are untested on this machine's GPUs; {HOW_TO_TEST}"
    if changed:
        name, then, now = changed[0]
        return f"the self-test is outdated ({name}: {then or 'unknown'}, now {now}); {HOW_TO_TEST}"
    if not verified:
        return "this machine's self-test failed"
    if not tested:
        return f"this machine's self-test used fewer than two GPUs; {HOW_TO_TEST}"
    passed, result, tested_processes = tested
    if not passed:
        return f"in this machine's self-test, {result}"
    if processes > tested_processes:
        return f"this machine's self-test used fewer GPUs ({tested_processes}, not {processes}); {HOW_TO_TEST}"
    return ""
