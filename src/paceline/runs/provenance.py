"""The versions, hardware, commit and start time that are recorded in a run's config.toml."""

from __future__ import annotations

import os
import platform
import subprocess
from collections import Counter
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from paceline.core.machine_load import excess_load
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
        "load_average_at_start": excess_load(),  # only if the machine was busy
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    return {name: value for name, value in found.items() if value}


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
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
