"""Statistics of real pictures, kept between runs: they are the same as long as data and protocol are."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

from paceline.core.checksums import checksum_of_content
from paceline.evaluation.sums import Statistics


def folder() -> Path:
    """Where statistics are kept."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "paceline" / "statistics"


def find(identity: Mapping[str, Any], device: torch.device) -> Statistics | None:
    """The statistics that were kept under an identity; none where they are not there or damaged."""
    path = _path(identity)
    try:
        changed_at = path.stat().st_mtime_ns
    except OSError:
        return None
    return _read(path, json.dumps(identity, sort_keys=True), device, changed_at)


@lru_cache(maxsize=1)  # a run asks again at every evaluation
def _read(path: Path, identity: str, device: torch.device, changed_at: int) -> Statistics | None:
    try:
        content = path.read_bytes()
        note = json.loads(path.with_suffix(".json").read_text())
    except (OSError, ValueError):
        return None
    if note.get("sha256") != sha256(content).hexdigest() or note.get("identity") != json.loads(identity):
        return None
    return Statistics(**{name: value.double().to(device) for name, value in safetensors.torch.load(content).items()})


def keep(identity: Mapping[str, Any], statistics: Statistics) -> None:
    """Keeps statistics for the next one who asks; a folder that cannot be written is no mistake."""
    path = _path(identity)
    tensors = {name: value.cpu().contiguous() for name, value in vars(statistics).items()}
    tensors["rows"] = tensors["rows"].float()  # as the network gave them
    content = safetensors.torch.save(tensors)
    note = {"identity": dict(identity), "sha256": sha256(content).hexdigest()}
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        for target, data in ((path, content), (path.with_suffix(".json"), json.dumps(note, indent=1).encode())):
            beside = target.with_name(f"{target.name}.{os.getpid()}")
            beside.write_bytes(data)
            beside.replace(target)


def _path(identity: Mapping[str, Any]) -> Path:
    key = checksum_of_content(identity)[:32]
    return folder() / f"{key}.safetensors"
