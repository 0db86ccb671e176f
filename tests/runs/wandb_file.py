"""Read the records in a `.wandb` file, which W&B writes in offline mode, to check what was logged."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FILE_HEADER_BYTES, RECORD_HEADER_BYTES, BLOCK_BYTES = 7, 7, 2**15
FULL, LAST = 1, 4  # types of the last (or only) part of a record


def records(file: Path) -> Iterator[Any]:
    """Yield the protobuf records in a file, which has the format of a LevelDB log."""
    from wandb.proto.wandb_internal_pb2 import Record

    content, position, parts = file.read_bytes(), FILE_HEADER_BYTES, b""
    while position + RECORD_HEADER_BYTES <= len(content):
        left = BLOCK_BYTES - position % BLOCK_BYTES
        if left < RECORD_HEADER_BYTES:  # the rest of a block is padding
            position += left
            continue
        _, length, kind = struct.unpack("<IHB", content[position : position + RECORD_HEADER_BYTES])
        position += RECORD_HEADER_BYTES
        parts += content[position : position + length]
        position += length
        if kind in (FULL, LAST):
            yield Record.FromString(parts)
            parts = b""


def history(file: Path) -> list[tuple[str, int, Any]]:
    """Return the name, step and value of everything that was logged; the value of an image is the path to its file."""
    found = []
    for record in records(file):
        for item in record.history.item:
            name, *rest = item.nested_key or [item.key]
            if not name.startswith("_") and rest in ([], ["path"]):
                found.append((name, record.history.step.num, json.loads(item.value_json)))
    return found


def config(file: Path) -> dict[str, Any]:
    """Return the settings of the run."""
    updates = [update for record in records(file) for update in record.run.config.update]
    return {update.key or "/".join(update.nested_key): json.loads(update.value_json) for update in updates}


def summary(file: Path) -> dict[str, Any]:
    """Return the values in the run's summary that were set explicitly."""
    updates = [update for record in records(file) for update in record.summary.update]
    return {update.key or "/".join(update.nested_key): json.loads(update.value_json) for update in updates}
