"""The machine of a run: recorded versions, hardware and git commit, and readings of the host and of a GPU."""

from __future__ import annotations

import subprocess
import time
from datetime import UTC, datetime, timedelta
from importlib.metadata import version
from pathlib import Path

import pytest
import torch

from paceline.runs import readings as readings_module
from paceline.runs.provenance import versions_and_hardware
from paceline.runs.readings import GpuReadings, HostReadings

MIB = 2**20


def test_versions_hardware_and_time_are_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    spec = versions_and_hardware()
    assert spec["torch"] == version("torch") and spec["lightning"] == version("lightning")
    assert spec["threads"] == str(torch.get_num_threads())
    assert int(spec["cores"]) >= 1 and spec["memory"].endswith("GiB") and spec["cpu"] and spec["python"]
    assert abs(datetime.fromisoformat(spec["started"]) - datetime.now(UTC)) < timedelta(minutes=1)
    assert all(type(value) is str and value for value in spec.values())


def test_the_git_commit_and_uncommitted_changes_are_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert "git_commit" not in versions_and_hardware()
    (tmp_path / "file").write_text("one")
    author = ["-c", "user.name=a", "-c", "user.email=a@example.com"]
    for command in (["init", "-q"], ["add", "file"], [*author, "commit", "-q", "-m", "one"]):
        subprocess.run(["git", *command], check=True)
    commit = subprocess.run(["git", "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
    assert versions_and_hardware()["git_commit"] == commit
    (tmp_path / "file").write_text("two")
    assert versions_and_hardware()["git_commit"] == f"{commit} with changes"
    assert capfd.readouterr() == ("", "")


def write_proc(root: Path, *, busy: int, idle: int, sectors: int, received: int, devices: bool = True) -> None:
    """Write the files that the readings need, with the given counters."""
    (root / "proc/self").mkdir(parents=True, exist_ok=True)
    (root / "proc/net").mkdir(exist_ok=True)
    (root / "proc/stat").write_text(f"cpu  {busy} 0 0 {idle} 0 0 0 0 0 0\ncpu0 1 2 3\nintr 5\n")
    (root / "proc/meminfo").write_text(
        "MemTotal: 8388608 kB\nMemFree: 1 kB\nMemAvailable: 2097152 kB\nHugePages_Total: 0\n"
    )
    (root / "proc/loadavg").write_text("3.25 1.10 0.50 2/345 6789\n")
    (root / "proc/self/status").write_text("Name:\tpython\nVmRSS:\t 1048576 kB\n")
    disks = [f"8 0 {name} 1 0 {sectors} 0 1 0 {2 * sectors} 0 0 0 0" for name in ("sda", "sda1", "loop0", "dm-0")]
    (root / "proc/diskstats").write_text("\n".join(disks) + "\n")
    rows = [f"{name}: {received} 1 0 0 0 0 0 0 {2 * received} 1 0 0 0 0 0 0" for name in ("lo", "eth0", "veth1")]
    (root / "proc/net/dev").write_text("Inter-| Receive\n face |bytes\n" + "\n".join(rows) + "\n")
    for name in ("block/sda", "block/loop0", "block/dm-0", "class/net/lo", "class/net/veth1", "class/net/eth0"):
        (root / "sys" / name).mkdir(parents=True, exist_ok=True)
    if devices:
        (root / "sys/class/net/eth0/device").mkdir(exist_ok=True)


def read_twice(root: Path, monkeypatch: pytest.MonkeyPatch, **counters: int) -> list[dict[str, float]]:
    now = [100.0]
    monkeypatch.setattr(readings_module.time, "monotonic", lambda: now[0])
    readings = HostReadings(root, root / "proc", root / "sys")
    first = readings.read()
    now[0] += 1.9
    assert readings.read() == {}  # too soon
    now[0] += 2.1
    write_proc(root, **counters)
    return [first, readings.read()]


def test_rates_are_averages_since_the_last_reading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_proc(tmp_path, busy=1000, idle=1000, sectors=0, received=5)
    counters = {"busy": 1300, "idle": 1100, "sectors": 8 * MIB // 512, "received": 5 + 4 * MIB}
    first, second = read_twice(tmp_path, monkeypatch, **counters)
    assert first["host/memory_gib"] == 6 and first["host/process_memory_gib"] == 1
    assert first.keys() == {
        "host/memory_gib",
        "host/process_memory_gib",
        "host/disk_free_gib",
        "host/load_average",
    }
    assert first["host/load_average"] == 3.25
    assert second["host/cpu_percent"] == 75
    assert second["host/disk_read_mib_per_second"] == 2 and second["host/disk_write_mib_per_second"] == 4
    assert second["host/network_receive_mib_per_second"] == 1 and second["host/network_send_mib_per_second"] == 2


def test_without_network_devices_all_interfaces_count_and_a_counter_that_shrinks_has_no_rate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_proc(tmp_path, busy=0, idle=0, sectors=100, received=0, devices=False)
    _, second = read_twice(tmp_path, monkeypatch, busy=1, idle=0, sectors=0, received=4 * MIB, devices=False)
    assert second["host/network_receive_mib_per_second"] == 2  # eth0 and veth1, but not lo
    assert "host/disk_read_mib_per_second" not in second


def test_a_system_without_proc_has_only_the_free_disk_space_and_this_machine_has_more(tmp_path: Path) -> None:
    assert HostReadings(tmp_path, tmp_path / "no-proc", tmp_path / "no-sys").read().keys() == {"host/disk_free_gib"}
    values = HostReadings(tmp_path).read()
    assert values["host/memory_gib"] > 0 and values["host/process_memory_gib"] > 0


def test_without_a_gpu_there_are_no_gpu_readings() -> None:
    assert GpuReadings(None).read() == {}
    assert torch.cuda.is_available() or GpuReadings(0).read() == {}


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
