"""Readings of the GPU and the host: load, memory, power, temperature, disk and network."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from paceline.core.host import read_lines, read_table

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
