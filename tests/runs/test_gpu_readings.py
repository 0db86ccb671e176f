"""GPU readings (load, memory, power) are recorded on a GPU and omitted on a CPU."""

from __future__ import annotations

import time

import pytest
import torch

from paceline.runs.readings import GpuReadings


def test_a_run_on_the_cpu_has_no_gpu_readings() -> None:
    assert GpuReadings(None).read() == {}


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without GPUs")
def test_a_machine_without_gpus_has_no_gpu_readings() -> None:
    assert GpuReadings(0).read() == {}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_reports_load_memory_power_temperature_and_energy() -> None:
    readings = GpuReadings(0)
    held = torch.ones(2**28, device="cuda")  # allocates 1 GiB
    start = time.perf_counter()
    values = readings.read()
    assert time.perf_counter() - start < 0.1
    assert values["gpu/memory_gib"] > 1 and values["gpu/peak_memory_gib"] >= 1
    assert 0 <= values["gpu/utilisation"] <= 100
    assert values["gpu/power_watts"] > 10 and 10 < values["gpu/temperature_celsius"] < 110
    assert readings.read() == {}, "too soon after the last reading"
    assert GpuReadings(0).read()["gpu/energy_joules"] >= values["gpu/energy_joules"] > 0
    del held
