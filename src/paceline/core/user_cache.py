"""The folder in which Paceline caches files for the current user."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def user_cache() -> Path:
    """Return Paceline's cache folder, usually `~/.cache/paceline`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "paceline"


def writable_cache(name: str) -> Path | None:
    """Create a folder inside Paceline's cache folder and return it; None if it cannot be written."""
    try:
        folder = user_cache() / name
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except (OSError, RuntimeError):  # RuntimeError: the user has no home folder
        return None
    return folder
