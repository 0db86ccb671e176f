"""The tensor files of a checkpoint, and how one process writes them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from paceline.core.files import SAFETENSORS, sync
from paceline.runs.snapshot import Snapshot
from paceline.runs.tensors import TensorNotes, pack

WEIGHTS = f"weights{SAFETENSORS}"
STATE = f"state{SAFETENSORS}"
TENSORS = (WEIGHTS, STATE)


@dataclass(frozen=True)
class Written:
    """A tensor file that is complete and synced."""

    sha256: str
    notes: TensorNotes


# Writes the tensor files to a folder, given a snapshot and the metadata of the weights file.
WriteTensors = Callable[[Path, Snapshot, Mapping[str, str]], dict[str, Written]]


def write_alone(folder: Path, snapshot: Snapshot, metadata: Mapping[str, str]) -> dict[str, Written]:
    """Write all tensors from this process, which has them in full."""
    written = {}
    for name, (content, notes) in zip(TENSORS, (pack(snapshot.weights, metadata), pack(snapshot.state)), strict=True):
        (folder / name).write_bytes(content)
        sync(folder / name)
        written[name] = Written(sha256(content).hexdigest(), notes)
    return written
