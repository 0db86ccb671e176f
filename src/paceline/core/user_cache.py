"""The folder in which Paceline caches files for the current user."""

from __future__ import annotations

import os
from pathlib import Path


def user_cache() -> Path:
    """Return Paceline's cache folder, usually `~/.cache/paceline`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "paceline"
