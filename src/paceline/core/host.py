"""The memory of the host: what is free for this process, and what it uses."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath

# Names of files in a cgroup's folder. The last name in each tuple is the one used by cgroup v1.
LIMITS = ("memory.max", "memory.high", "memory.limit_in_bytes")
USED = ("memory.current", "memory.usage_in_bytes")
RECLAIMABLE = ("inactive_file", "total_inactive_file")  # page cache in memory.stat; "total" includes child groups
DEFAULT_FREE_BYTES = 4 * 2**30  # assumed if the system does not report free memory


def free_host_bytes(root: Path = Path("/")) -> int:
    """Return the machine's available memory, or what is left in this process's container or job, if that is less."""
    available = read_table(root / "proc/meminfo").get("MemAvailable:", DEFAULT_FREE_BYTES // 1024) * 1024
    return max(0, min([available, *(left for group in _groups(root) for left in _free_bytes_in(group))]))


def own_host_bytes(root: Path = Path("/")) -> int:
    """Return the memory that this process uses; 0 if the system does not report it."""
    return read_table(root / "proc/self/status").get("VmRSS:", 0) * 1024


def _groups(root: Path) -> Iterator[Path]:
    """Yield the folders of the cgroups that account for this process's memory, and of their parents."""
    own: dict[str, str] = {}
    for line in read_lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        own |= dict.fromkeys(controllers.split(","), path)  # for cgroup v2, the list of controllers is empty
    for line in read_lines(root / "proc/self/mountinfo"):
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
    cached = max(read_table(group / "memory.stat").get(name, 0) for name in RECLAIMABLE)
    used = sum(_numbers(group, USED)) - cached
    yield from (limit - used for limit in _numbers(group, LIMITS))


def _numbers(group: Path, names: tuple[str, ...]) -> Iterator[int]:
    yield from (int(line) for name in names for line in read_lines(group / name) if line.isdigit())


def read_table(file: Path) -> dict[str, int]:
    """Parse a file whose lines contain a name and a number."""
    rows = (line.split() for line in read_lines(file))
    return {row[0]: int(row[1]) for row in rows if len(row) > 1 and row[1].isdigit()}


def read_lines(file: Path) -> list[str]:
    """Return the lines of a file; none if it cannot be read."""
    try:
        return file.read_text().splitlines()
    except OSError:
        return []
