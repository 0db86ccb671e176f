"""The folder in which Paceline caches files for the current user."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def user_cache() -> Path:
    """Return Paceline's cache folder, usually `~/.cache/paceline`.

    A user without a home folder, such as a numeric user in a container, has a folder in which every write fails. The
    folder for temporary files would not be safe, because other users can write to it.
    """
    if folder := os.environ.get("XDG_CACHE_HOME"):
        return Path(folder) / "paceline"
    try:
        return Path.home() / ".cache" / "paceline"
    except RuntimeError:
        return Path(os.devnull) / "paceline"


def writable_cache(name: str) -> Path | None:
    """Create a folder inside Paceline's cache folder and return it; None if it cannot be written."""
    try:
        folder = user_cache() / name
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError:
        return None
    return folder
