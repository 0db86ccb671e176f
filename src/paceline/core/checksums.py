"""SHA-256 of what is kept in files, by which later readers know it again."""

from __future__ import annotations

import json
from hashlib import file_digest, sha256
from pathlib import Path
from typing import Any


def checksum_of_file(file: Path) -> str:
    """The checksum of a file's bytes."""
    with file.open("rb") as opened:
        return file_digest(opened, "sha256").hexdigest()


def checksum_of_content(content: Any) -> str:
    """The checksum of what JSON can hold, whatever the order of its names: what a manifest has of itself."""
    return sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
