"""Write a trace, then summarise and compress it in a separate process.

A large trace takes minutes and gigabytes of memory. In the training process, this would stop the training loop, and the
launcher could mistake the pause for a hang.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.core.errors import DISK_FAILED
from paceline.training import trace
from paceline.training.trace import TraceTimes

if TYPE_CHECKING:
    from torch.autograd.profiler import profile

LEFTOVERS = ("rank-*.tmp", "rank-*.partial")  # unfinished files of torch, and of this module and `trace`
PROBE_BYTES = 2**16


class TraceError(Exception):
    """Raised if a trace cannot be written, summarised or compressed."""


def write_trace(tracing: profile, path: Path) -> None:
    """Write a trace to a file, and free its memory."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)  # from an earlier command
    try:
        tracing.export_chrome_trace(str(path))
    except RuntimeError as error:
        raise TraceError(str(error)) from error
    finally:
        tracing.kineto_results = None
    if not path.exists():  # torch raises no error if it cannot write
        raise TraceError("torch could not write the trace")


def summarise_trace(path: Path) -> TraceTimes:
    """Return the times in a trace file, and replace the file with a compressed one; wait until this is done."""
    # With -P, modules in the current folder do not shadow others. The module does not import torch.
    command = [sys.executable, "-P", "-m", trace.__name__, str(path), str(os.getpid())]
    finished = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if finished.returncode:
        last = (finished.stderr.splitlines() or [f"exit code {finished.returncode}"])[-1]
        raise TraceError(last)
    return TraceTimes.from_json(json.loads(finished.stdout))


def clean_up(path: Path) -> str:
    """Remove the unfinished files of a trace that failed; return why the disk is full, empty if it is not.

    If the disk is full, the trace itself is also removed, because checkpoints need the space.
    """
    reason = ""
    probe = path.with_suffix(".json.partial")
    try:  # while the unfinished files still fill the disk
        probe.write_bytes(bytes(PROBE_BYTES))
    except OSError as error:
        reason = str(error.strerror) if error.errno in DISK_FAILED else ""
    if reason:
        path.unlink(missing_ok=True)
    remove_unfinished(path.parent, f"{path.stem}.*")
    return reason


def remove_unfinished(folder: Path, names: str = "*") -> None:
    """Remove files of traces that were not finished, such as those of a killed process."""
    for pattern in LEFTOVERS:
        for leftover in folder.glob(pattern):
            if leftover.match(names):
                with suppress(OSError):
                    leftover.unlink()


def remove_traces_of_other_ranks(folder: Path, num_ranks: int) -> None:
    """Remove traces of ranks that this run does not have, which an earlier profile with more ranks left."""
    for file in folder.glob("rank-*.json.gz"):
        rank = file.name.removeprefix("rank-").removesuffix(".json.gz")
        if rank.isdecimal() and int(rank) >= num_ranks:
            with suppress(OSError):
                file.unlink()
