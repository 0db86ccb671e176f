"""Readings of the GPU and the host: load, memory, power, temperature, disk and network."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

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
_MIB = 2**20
_SECTOR_BYTES = 512  # unit of /proc/diskstats on every device
_NOT_DISKS = ("dm-", "loop", "md", "ram", "sr", "zram")  # devices without storage of their own


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
            with suppress(OSError, ValueError, KeyError, IndexError):  # not Linux, or a container that hides the file
                values |= part()
        return values

    def _memory(self) -> dict[str, float]:
        sizes = _table(self._proc / "meminfo")
        return {"host/memory_gib": 1024 * (sizes["MemTotal"] - sizes["MemAvailable"]) / _GIB}

    def _process(self) -> dict[str, float]:
        return {"host/process_memory_gib": 1024 * _table(self._proc / "self" / "status")["VmRSS"] / _GIB}

    def _disk_space(self) -> dict[str, float]:
        disk = os.statvfs(self._folder)
        return {"host/disk_free_gib": disk.f_bavail * disk.f_frsize / _GIB}

    def _load(self) -> dict[str, float]:
        """Return the average number of processes that were running or waiting for a core during the last minute."""
        return {LOAD_AVERAGE: float(_lines(self._proc / "loadavg")[0].split()[0])}

    def _rates(self) -> dict[str, float]:
        """Return the CPU usage and the traffic since the previous call."""
        before, now = self._before, self._count()
        self._before = now
        if not before:
            return {}
        grown = {name: now[name] - before[name] for name in now}
        values = {}
        if grown["total"] > 0:
            values["host/cpu_percent"] = 100 * grown["busy"] / grown["total"]
        for name in ("disk_read", "disk_write", "network_receive", "network_send"):
            if grown[name] >= 0:  # a device may have been removed in the meantime
                values[f"host/{name}_mib_per_second"] = grown[name] / grown["seconds"] / _MIB
        return values

    def _count(self) -> dict[str, float]:
        """Return counters that only grow: CPU time in clock ticks, and traffic in bytes."""
        ticks = [int(word) for word in _lines(self._proc / "stat")[0].split()[1:9]]
        idle = ticks[3] + ticks[4]  # idle and waiting for a disk
        disks = [line.split() for line in self._lines_or_none(self._proc / "diskstats")]
        disks = [words for words in disks if self._is_disk(words[2])]
        network = self._interfaces()
        return {
            "seconds": time.monotonic(),
            "busy": sum(ticks) - idle,
            "total": sum(ticks),
            "disk_read": _SECTOR_BYTES * sum(int(words[5]) for words in disks),
            "disk_write": _SECTOR_BYTES * sum(int(words[9]) for words in disks),
            "network_receive": sum(int(words[0]) for words in network),
            "network_send": sum(int(words[8]) for words in network),
        }

    def _is_disk(self, name: str) -> bool:
        """Return whether a block device is a disk and not a partition, which would be counted twice."""
        return not name.startswith(_NOT_DISKS) and (self._sys / "block" / name.replace("/", "!")).exists()

    def _interfaces(self) -> list[list[str]]:
        """Return the counters of each network device.

        Bridges and tunnels are left out, because the devices also count their traffic. A container has no network
        devices, so all its interfaces except the loopback interface are used.
        """
        rows = dict(line.split(":", 1) for line in self._lines_or_none(self._proc / "net" / "dev")[2:])
        counters = {name.strip(): row.split() for name, row in rows.items() if name.strip() != "lo"}
        devices = {name for name in counters if (self._sys / "class" / "net" / name / "device").exists()}
        return [row for name, row in counters.items() if name in devices or not devices]

    @staticmethod
    def _lines_or_none(path: Path) -> list[str]:
        try:
            return _lines(path)
        except OSError:
            return []


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines()


def _table(path: Path) -> dict[str, int]:
    """Return the sizes in a file with lines such as `MemTotal:  16384 kB`, in KiB."""
    words = [line.split() for line in _lines(path)]
    return {row[0].rstrip(":"): int(row[1]) for row in words if len(row) == 3 and row[2] == "kB"}
