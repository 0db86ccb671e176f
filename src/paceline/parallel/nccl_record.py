"""NCCL's flight recorder: the collectives that libtorch started, including those that Python does not see.

It complements `core.flight_recorder` on several GPUs. It has not been tested on several GPUs.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import torch.distributed as dist

from paceline.parallel.torch_internals import nccl_trace

# The first variable turns the recorder on. The second is its former name, for which torch prints a warning.
VARIABLES = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
NUM_ENTRIES = "2000"


def enable_flight_recorder(backend: str) -> None:
    """Make NCCL record its collectives, unless the user has set its size; call this before the group is created."""
    if backend == "nccl" and not any(name in os.environ for name in VARIABLES):
        os.environ[VARIABLES[0]] = NUM_ENTRIES


def write_nccl_record(logs: Path, rank: int) -> None:
    """Write the collectives that NCCL recorded to logs/nccl-rank-N.json; do nothing without NCCL."""
    if not (dist.is_initialized() and dist.get_backend() == "nccl"):
        return
    with suppress(Exception):  # an additional file must not hide the reason for a hang
        (logs / f"nccl-rank-{rank}.json").write_bytes(nccl_trace())
