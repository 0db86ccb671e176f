"""Small JSON files that say what was done, whole or not there at all."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


def keep(path: Path, value: dict[str, Any]) -> None:
    """Writes the file beside and renames it, so that a kill leaves no half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(path.name + ".partial")
    beside.write_text(json.dumps(value))
    os.replace(beside, path)


def kept(path: Path) -> dict[str, Any]:
    """What the file holds; nothing where there is none, or one that cannot be read."""
    try:
        value = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}
