"""A cache of statistics for real images, valid as long as the data and the protocol stay the same."""

from __future__ import annotations

import json
from functools import lru_cache
from hashlib import sha256
from pathlib import Path

import safetensors.torch
import torch

from paceline.core.checksums import checksum_of_content
from paceline.core.files import SAFETENSORS, write_file, write_json
from paceline.core.lock import LOCK, Lock
from paceline.core.small_files import read_json
from paceline.core.user_cache import user_cache
from paceline.evaluation.protocol import Protocol
from paceline.evaluation.sums import Statistics

_not_stored: dict[Path, Statistics] = {}  # the last statistics that could not be written, for this process only


def cache_folder() -> Path:
    """Return the folder in which statistics are cached."""
    return user_cache() / "statistics"


def find_statistics(protocol: Protocol, device: torch.device) -> Statistics | None:
    """Return the cached statistics for a protocol; None if they are missing or damaged."""
    path = _path(protocol)
    if path in _not_stored:
        return _not_stored[path]
    try:
        changed_at = path.stat().st_mtime_ns
    except OSError:
        return None
    return _read(path, json.dumps(protocol, sort_keys=True), device, changed_at)


@lru_cache(maxsize=1)  # read once for all evaluations of a run
def _read(path: Path, protocol: str, device: torch.device, changed_at: int) -> Statistics | None:
    try:
        content = path.read_bytes()
    except OSError:
        return None
    manifest = read_json(path.with_suffix(".json"))
    if manifest.get("sha256") != sha256(content).hexdigest() or manifest.get("protocol") != json.loads(protocol):
        return None
    return Statistics(**{name: value.double().to(device) for name, value in safetensors.torch.load(content).items()})


def lock_statistics(protocol: Protocol) -> Lock | None:
    """Return a lock to hold while statistics are computed and stored; None if the folder is not writable.

    Raises:
        InUse: If another process is computing the same statistics.
    """
    path = _path(protocol)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return Lock(path.parent, f".{path.stem}{LOCK}", wait_seconds=0)
    except OSError:
        return None


def store_statistics(protocol: Protocol, statistics: Statistics) -> None:
    """Cache statistics for later evaluations: in a file or, if the folder is not writable, in this process."""
    path = _path(protocol)
    tensors = {name: value.cpu().contiguous() for name, value in vars(statistics).items()}
    tensors["rows"] = tensors["rows"].float()  # float32 is the precision of the network's output
    content = safetensors.torch.save(tensors)
    manifest = {"protocol": dict(protocol), "sha256": sha256(content).hexdigest()}
    _not_stored.clear()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_file(path, content, durable=False)
        write_json(path.with_suffix(".json"), manifest, durable=False, indent=1)
    except OSError:
        _not_stored[path] = statistics


def _path(protocol: Protocol) -> Path:
    key = checksum_of_content(protocol)[:32]
    return cache_folder() / f"{key}{SAFETENSORS}"
