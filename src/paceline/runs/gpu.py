"""GPU readings from NVML and torch: load, memory, power, temperature and energy."""

from __future__ import annotations

import time
from collections.abc import Callable
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
