"""Read the resident memory of a process, which Linux reports in /proc."""

from __future__ import annotations

import os
import re
from pathlib import Path


def resident_bytes() -> int:
    """Return the memory that this process uses now."""
    return _read("VmRSS", None)


def peak_resident_bytes(process: int | None = None) -> int:
    """Return the most memory that a process has used since its start or since `reset_peak`; 0 if it has ended."""
    return _read("VmHWM", process)


def reset_peak() -> None:
    """Measure the peak of this process from now on."""
    Path("/proc/self/clear_refs").write_text("5")


def _read(name: str, process: int | None) -> int:
    try:
        text = Path(f"/proc/{process or os.getpid()}/status").read_text()
    except OSError:
        return 0
    found = re.search(rf"{name}:\s+(\d+) kB", text)
    return int(found[1]) * 1024 if found else 0
