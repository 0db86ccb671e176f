"""The free memory is the machine's, or less if a container or job has a memory limit."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.core.host import free_host_bytes

GB = 10**9
UNLIMITED_V1 = 9223372036854771712
V2 = "30 23 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate"
V1 = "35 31 0:32 {shown} /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory"
V1_CPU = "32 31 0:29 / /sys/fs/cgroup/cpu rw,relatime - cgroup cgroup rw,cpu"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A simulated file system root for a machine with 64 GB of free memory."""
    write(tmp_path / "proc/meminfo", f"MemTotal: {128 * GB // 1000} kB\nMemAvailable: {64 * GB // 1024} kB\n")
    return tmp_path


def write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f"{text}\n")


def belong(root: Path, groups: str, *mounts: str) -> None:
    write(root / "proc/self/cgroup", groups)
    write(root / "proc/self/mountinfo", "\n".join(("22 1 8:1 / / rw - ext4 /dev/sda1 rw", *mounts)))


def limit(group: Path, most: str, used: int, cached: int = 0, high: str = "max") -> None:
    """Write a group's memory files as cgroup v2 does."""
    write(group / "memory.max", most)
    write(group / "memory.high", high)
    write(group / "memory.current", str(used))
    write(group / "memory.stat", f"anon {used - cached}\ninactive_file {cached}\nactive_file 0")


def limit_v1(group: Path, most: int, used: int, cached: int = 0) -> None:
    write(group / "memory.limit_in_bytes", str(most))
    write(group / "memory.usage_in_bytes", str(used))
    write(group / "memory.stat", f"inactive_file {cached // 2}\ntotal_rss 5\ntotal_inactive_file {cached}")


def test_without_a_cgroup_limit_the_machines_free_memory_is_used(root: Path) -> None:
    assert free_host_bytes(root) == 64 * GB
    belong(root, "0::/user.slice", V2)
    limit(root / "sys/fs/cgroup/user.slice", "max", 3 * GB)
    assert free_host_bytes(root) == 64 * GB


def test_the_free_memory_of_a_job_is_its_cgroup_limit_minus_usage(root: Path) -> None:
    belong(root, "0::/system.slice/slurm/job_7/step_0", V2)
    job = root / "sys/fs/cgroup/system.slice/slurm/job_7"
    limit(job, str(16 * GB), used=6 * GB)
    limit(job / "step_0", "max", used=5 * GB)
    assert free_host_bytes(root) == 10 * GB
    limit(job / "step_0", str(8 * GB), used=5 * GB)
    assert free_host_bytes(root) == 3 * GB, "the minimum over the group and its ancestors"
    limit(job / "step_0", str(8 * GB), used=5 * GB, cached=4 * GB)
    assert free_host_bytes(root) == 7 * GB, "cached files can be evicted"
    limit(job / "step_0", str(8 * GB), used=5 * GB, high=str(6 * GB))
    assert free_host_bytes(root) == 1 * GB, "memory.high counts as a limit, since processes above it are throttled"
    limit(job / "step_0", str(8 * GB), used=9 * GB)
    assert free_host_bytes(root) == 0


def test_a_container_memory_limit_is_read_from_the_root_group(root: Path) -> None:
    belong(root, "0::/", V2)
    limit(root / "sys/fs/cgroup", str(4 * GB), used=1 * GB)
    assert free_host_bytes(root) == 3 * GB
    belong(root, "0::/../../other", V2)
    assert free_host_bytes(root) == 3 * GB, "for a group outside the mount, the visible ancestor counts"


def test_memory_limits_are_also_read_from_cgroup_v1(root: Path) -> None:
    belong(root, "4:memory:/slurm/job_7\n1:cpu:/\n0::/", V1_CPU, V1.format(shown="/"))
    limit_v1(root / "sys/fs/cgroup/memory", UNLIMITED_V1, used=20 * GB)
    limit_v1(root / "sys/fs/cgroup/cpu", 1, used=0)
    limit_v1(root / "sys/fs/cgroup/memory/slurm/job_7", 12 * GB, used=4 * GB, cached=1 * GB)
    assert free_host_bytes(root) == 9 * GB


def test_memory_limits_are_read_if_only_the_containers_group_is_mounted(root: Path) -> None:
    belong(root, "4:cpu,memory:/docker/abc/inner", V1.format(shown="/docker/abc"))
    limit_v1(root / "sys/fs/cgroup/memory", 12 * GB, used=2 * GB)
    limit_v1(root / "sys/fs/cgroup/memory/inner", 5 * GB, used=2 * GB)
    assert free_host_bytes(root) == 3 * GB


def test_free_memory_of_this_machine_is_positive_and_at_most_its_total() -> None:
    lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    assert 0 < free_host_bytes() <= int(lines["MemTotal"].split()[0]) * 1024
