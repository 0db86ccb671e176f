"""Which code a run, a weights file or a settings file may make Paceline run.

Such a file may come from a stranger. Code that it names runs only if the user named the same file, so that the code
is already part of this process, or passed `--trust`.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

from paceline.core.errors import UserError
from paceline.core.user_file import is_loaded, is_path

TRUST = "PACELINE_TRUST"  # an environment variable, so that worker processes inherit it


def set_trust(given: bool) -> None:
    """Record whether the user passed `--trust`, for this process and those that it starts."""
    if given:
        os.environ[TRUST] = "1"
    else:
        os.environ.pop(TRUST, None)


def trusts_files() -> bool:
    """Return whether the user passed `--trust`."""
    return os.environ.get(TRUST) == "1"


def may_run(plugin: str, *, trust: bool = False) -> bool:
    """Return whether a plugin that a file names may be loaded; those without a path are installed here."""
    return not is_path(plugin) or trust or trusts_files() or is_loaded(plugin)


def check_may_run(origin: str, plugins: Iterable[str], *, trust: bool = False) -> None:
    """Raise UserError for the first plugin that may not be loaded; `origin` is the file that names it."""
    for plugin in plugins:
        if not may_run(plugin, trust=trust):
            raise UserError(f"{origin}: names code to run ({plugin}), which is not run without --trust")
