"""SHA-256 checksums of files and of JSON content."""

from __future__ import annotations

import json
from hashlib import file_digest, sha256
from pathlib import Path


def checksum_of_file(file: Path) -> str:
    """Return the checksum of a file's bytes."""
    with file.open("rb") as opened:
        return file_digest(opened, "sha256").hexdigest()


def checksum_of_content(content: object) -> str:
    """Return the checksum of JSON content, which does not depend on key order."""
    return sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
