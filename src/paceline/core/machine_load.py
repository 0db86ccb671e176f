"""The load of this machine when a command started: speeds that were measured on a busy machine are too low."""

from __future__ import annotations

import os

MARGIN = 1.0  # a load average above the number of cores by more than this means that tasks had to wait
LOAD = "PACELINE_LOAD_AT_START"  # environment variable, so that all processes of a command report the same load


def record_load() -> None:
    """Remember the load average of the machine, before this command adds to it."""
    os.environ.setdefault(LOAD, f"{_load_average():.1f}")


def is_busy(load_average: float, cores: int) -> bool:
    """Return whether clearly more tasks than cores were running or waiting."""
    return load_average > cores + MARGIN


def excess_load() -> str:
    """Return the load average when the command started, as `5.3 on 2 cores`; empty if the machine was not busy.

    In a program that imports Paceline, return the current load average.
    """
    text = os.environ.get(LOAD) or f"{_load_average():.1f}"
    cores = os.cpu_count() or 1  # of the machine, because the load average is that of the machine
    return f"{text} on {cores} core{'s' * (cores > 1)}" if is_busy(float(text), cores) else ""


def _load_average() -> float:
    """Return the number of tasks that were running or waiting for a core, averaged over the last minute."""
    try:
        return os.getloadavg()[0]
    except (AttributeError, OSError):  # not available on this system
        return 0.0
