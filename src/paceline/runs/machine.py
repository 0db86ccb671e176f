"""The machine of a run: versions and hardware, the result of the self-test, and readings during training."""

from __future__ import annotations

import os
import platform
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from paceline.core.files import read_json, user_cache, write_json
from paceline.core.host import read_lines, read_table
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


_GIB = 2**30
_SECONDS_BETWEEN_READINGS = 2.0  # readings take milliseconds, and NVML's averages hardly change in less time


class GpuReadings:
    """Reads the load, memory, power, temperature and energy of one GPU.

    `device_index` is the GPU's index in torch. If it is None, there are no readings. Without NVML, only the peak memory
    is read.
    """

    def __init__(self, device_index: int | None) -> None:
        self._device_index = device_index if torch.cuda.is_available() else None
        self._readings = {} if self._device_index is None else _nvml_readings(self._device_index)
        self._next_at = 0.0

    def read(self) -> dict[str, float]:
        """Return the readings by name; empty if the last call was less than two seconds ago.

        Energy is the total since the driver was loaded.
        """
        if self._device_index is None or time.monotonic() < self._next_at:
            return {}
        self._next_at = time.monotonic() + _SECONDS_BETWEEN_READINGS
        values = {}
        for name, reading in self._readings.items():
            try:
                values[name] = float(reading())
            except Exception:  # NVML error: the GPU does not support this reading, or has failed
                continue
        values["gpu/peak_memory_gib"] = torch.cuda.max_memory_allocated(self._device_index) / _GIB
        return values


def _nvml_readings(device_index: int) -> dict[str, Callable[[], float]]:
    try:
        import pynvml

        pynvml.nvmlInit()
        gpu = _nvml_handle(pynvml, device_index)
    except Exception:  # pynvml or the driver is missing, or NVML does not list the GPU
        return {}
    return {
        "gpu/utilisation": lambda: pynvml.nvmlDeviceGetUtilizationRates(gpu).gpu,
        "gpu/memory_gib": lambda: pynvml.nvmlDeviceGetMemoryInfo(gpu).used / _GIB,
        "gpu/power_watts": lambda: pynvml.nvmlDeviceGetPowerUsage(gpu) / 1000,
        "gpu/temperature_celsius": lambda: pynvml.nvmlDeviceGetTemperature(gpu, pynvml.NVML_TEMPERATURE_GPU),
        "gpu/energy_joules": lambda: pynvml.nvmlDeviceGetTotalEnergyConsumption(gpu) / 1000,
    }


def _nvml_handle(pynvml: Any, device_index: int) -> Any:
    """Return NVML's handle for a torch device; the indices differ if CUDA_VISIBLE_DEVICES is set."""
    properties: Any = torch.cuda.get_device_properties(device_index)
    try:
        return pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{properties.uuid}")
    except pynvml.NVMLError:  # a MIG slice has a different kind of UUID; use the bus address of its GPU
        bus = f"{properties.pci_domain_id:08x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"
        return pynvml.nvmlDeviceGetHandleByPciBusId(bus)


LOAD_AVERAGE = "host/load_average"
_SECTOR_BYTES = 512  # unit of /proc/diskstats on every device
_VIRTUAL_DISKS = ("dm-", "loop", "md", "ram", "sr", "zram")


_RATES = ("disk_read", "disk_write", "network_receive", "network_send")


class HostReadings:
    """Reads the CPU usage, load average, memory, disk traffic and network traffic of this machine.

    The readings describe the entire machine, except for `host/process_memory_gib`. `folder` is on the disk whose free
    space is read. `proc` and `sys` are the mount points of the two virtual file systems.
    """

    def __init__(self, folder: Path, proc: Path = Path("/proc"), sys: Path = Path("/sys")) -> None:
        self._folder, self._proc, self._sys = folder, proc, sys
        self._before: dict[str, float] = {}
        self._next_at = 0.0

    def read(self) -> dict[str, float]:
        """Return the readings by name; empty if the last reading was less than two seconds ago.

        CPU usage and rates are averages since the previous reading, so the first reading has none.
        """
        if time.monotonic() < self._next_at:
            return {}
        self._next_at = time.monotonic() + _SECONDS_BETWEEN_READINGS
        values: dict[str, float] = {}
        for part in (self._memory, self._process, self._disk_space, self._load, self._rates):
            with suppress(OSError, ValueError, LookupError):  # not Linux, or a container that hides the file
                values |= part()
        return values

    def _memory(self) -> dict[str, float]:
        sizes = read_table(self._proc / "meminfo")
        return {"host/memory_gib": 1024 * (sizes["MemTotal:"] - sizes["MemAvailable:"]) / _GIB}

    def _process(self) -> dict[str, float]:
        return {"host/process_memory_gib": 1024 * read_table(self._proc / "self" / "status")["VmRSS:"] / _GIB}

    def _disk_space(self) -> dict[str, float]:
        disk = os.statvfs(self._folder)
        return {"host/disk_free_gib": disk.f_bavail * disk.f_frsize / _GIB}

    def _load(self) -> dict[str, float]:
        """Return the average number of processes that were running or waiting for a core during the last minute."""
        return {LOAD_AVERAGE: float(read_lines(self._proc / "loadavg")[0].split()[0])}

    def _rates(self) -> dict[str, float]:
        """Return the CPU usage and the traffic since the previous call."""
        before, self._before = self._before, self._count()
        grown = {name: count - before[name] for name, count in self._before.items()} if before else {}
        values = {"host/cpu_percent": 100 * grown["busy"] / grown["total"]} if grown.get("total", 0) > 0 else {}
        for name in _RATES if grown else ():
            if grown[name] >= 0:  # a device may have been removed in the meantime
                values[f"host/{name}_mib_per_second"] = grown[name] / grown["seconds"] / 2**20
        return values

    def _count(self) -> dict[str, float]:
        """Return counters that only grow: CPU time in clock ticks, and traffic in bytes."""
        ticks = [int(word) for word in read_lines(self._proc / "stat")[0].split()[1:9]]
        idle = ticks[3] + ticks[4]  # idle and waiting for a disk
        rows = [line.split() for line in read_lines(self._proc / "diskstats")]
        # Partitions are not listed in this folder; virtual devices have no storage of their own.
        disks = [row for row in rows if (self._sys / "block" / row[2].replace("/", "!")).exists()]
        disks = [row for row in disks if not row[2].startswith(_VIRTUAL_DISKS)]
        traffic = dict(line.split(":", 1) for line in read_lines(self._proc / "net" / "dev")[2:])
        traffic = {name.strip(): row for name, row in traffic.items() if name.strip() != "lo"}
        # The devices also count the traffic of bridges and tunnels. A container has no devices.
        devices = {name for name in traffic if (self._sys / "class" / "net" / name / "device").exists()}
        network = [row.split() for name, row in traffic.items() if name in devices or not devices]
        return {
            "seconds": time.monotonic(),
            "busy": sum(ticks) - idle,
            "total": sum(ticks),
            "disk_read": _SECTOR_BYTES * sum(int(row[5]) for row in disks),
            "disk_write": _SECTOR_BYTES * sum(int(row[9]) for row in disks),
            "network_receive": sum(int(row[0]) for row in network),
            "network_send": sum(int(row[8]) for row in network),
        }
