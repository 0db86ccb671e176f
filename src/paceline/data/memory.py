"""Measures how much memory is free for this process, and limits how much of it samples may use."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from types import MappingProxyType

import torch

from paceline.data.source import Source
from paceline.data.whole_source import bytes_needed

# Names of files in a cgroup's folder. The last name in each tuple is the one used by cgroup v1.
LIMITS = ("memory.max", "memory.high", "memory.limit_in_bytes")
USED = ("memory.current", "memory.usage_in_bytes")
RECLAIMABLE = ("inactive_file", "total_inactive_file")  # page cache in memory.stat; "total" includes child groups
DEFAULT_FREE_BYTES = 4 * 2**30  # assumed if the system does not report free memory
SHARES = {"cuda": 0.6, "cpu": 0.25}  # fraction of free memory for samples, by device type; the model uses the rest


def free_bytes(device: torch.device) -> int:
    """Return the free memory of a CUDA device, or of the host for any other device."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else free_host_bytes()


def free_host_bytes(root: Path = Path("/")) -> int:
    """Return the machine's available memory, or what is left in this process's container or job, if that is less."""
    available = _table(root / "proc/meminfo").get("MemAvailable:", DEFAULT_FREE_BYTES // 1024) * 1024
    return max(0, min([available, *(left for group in _groups(root) for left in _free_bytes_in(group))]))


def _groups(root: Path) -> Iterator[Path]:
    """Yield the folders of the cgroups that account for this process's memory, and of their parents."""
    own: dict[str, str] = {}
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        own |= dict.fromkeys(controllers.split(","), path)  # for cgroup v2, the list of controllers is empty
    for line in _lines(root / "proc/self/mountinfo"):
        place, _, system = line.partition(" - ")
        shown, mounted = place.split()[3:5]  # the cgroup at the root of the mount, and the mount point
        kind, *_, options = system.split()
        controller = {"cgroup": "memory", "cgroup2": ""}.get(kind)
        if controller in own and (not controller or controller in options.split(",")):
            inside = _inside(PurePosixPath(own[controller]), PurePosixPath(shown))
            yield from (root / mounted.lstrip("/") / group for group in (inside, *inside.parents))


def _inside(path: PurePosixPath, shown: PurePosixPath) -> PurePosixPath:
    """Return a cgroup's path relative to a mount, or the mount's root if the cgroup is not below the mount."""
    return path.relative_to(shown) if path.is_relative_to(shown) and ".." not in path.parts else PurePosixPath()


def _free_bytes_in(group: Path) -> Iterator[int]:
    """Yield the bytes that a cgroup has left under each of its limits."""
    cached = max(_table(group / "memory.stat").get(name, 0) for name in RECLAIMABLE)
    used = sum(_numbers(group, USED)) - cached
    yield from (limit - used for limit in _numbers(group, LIMITS))


def _numbers(group: Path, names: tuple[str, ...]) -> Iterator[int]:
    yield from (int(line) for name in names for line in _lines(group / name) if line.isdigit())


def _table(file: Path) -> dict[str, int]:
    """Parse a file whose lines contain a name and a number."""
    rows = (line.split() for line in _lines(file))
    return {row[0]: int(row[1]) for row in rows if len(row) > 1 and row[1].isdigit()}


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text().splitlines()
    except OSError:
        return []


class Budget:
    """The memory budget for samples: a fraction of the memory that is free at the start, shared by all sources."""

    def __init__(self, processes: int = 1, free: Mapping[str, int] = MappingProxyType({})) -> None:
        self.processes = processes  # number of processes that share host memory; each has its own GPU
        self.free = free  # free bytes by type of device, if they are not those of this machine
        self._left: dict[str, int] = {}
        self._taken: set[str] = set()

    def take(self, source: Source, device: torch.device) -> tuple[bool, str]:
        """Reserve memory for a source if enough of the budget is left; return whether it is, and an explanation."""
        kind = device.type
        num_sharing = self.processes if kind == "cpu" else 1
        if kind not in self._left:
            free = self.free[kind] if kind in self.free else free_bytes(device)
            self._left[kind] = int(free * SHARES[kind] / num_sharing)
        needed, left = bytes_needed(source), self._left[kind]
        fits = needed <= left
        shared = f", shared by {num_sharing} processes" if num_sharing > 1 else ""
        reason = (
            f"{_size(needed)} of samples {'fit' if fits else 'do not fit'} in {_size(left)} "
            f"({'what remains of ' if kind in self._taken else ''}{SHARES[kind]:.0%} of the free "
            f"{'GPU' if kind == 'cuda' else 'host'} memory{shared})"
        )
        if fits:
            self._left[kind] -= needed
            self._taken.add(kind)
        return fits, reason


def _size(count: int) -> str:
    value, unit = (count / 1e9, "GB") if count >= 1e9 else (count / 1e6, "MB")
    return f"{value:,.0f} {unit}" if value >= 10 else f"{value:.2g} {unit}"
