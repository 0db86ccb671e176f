"""Decides whether Paceline may run the code that a run, a weights file or a settings file refers to.

These files may be untrusted. The code runs only if the user passed `--trust`, or if this process has already imported
it because the user named it on the command line.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from paceline.core.errors import UserError
from paceline.core.registry import is_loaded, is_path

TRUST = "PACELINE_TRUST"  # environment variable, which worker processes inherit


def set_trust(given: bool) -> None:
    """Record whether the user passed `--trust`, for this process and its child processes."""
    if given:
        os.environ[TRUST] = "1"
    else:
        os.environ.pop(TRUST, None)


@contextmanager
def trusting(given: bool) -> Iterator[None]:
    """If `given`, trust files within this context, as with `--trust`, including in child processes started in it."""
    before = trusts_files()
    set_trust(given or before)
    try:
        yield
    finally:
        set_trust(before)


def trusts_files() -> bool:
    """Return whether the user passed `--trust`."""
    return os.environ.get(TRUST) == "1"


def may_run(plugin: str, *, trust: bool = False) -> bool:
    """Return whether a plugin named in a file may be loaded; only plugins in .py files can be refused."""
    return not is_path(plugin) or trust or trusts_files() or is_loaded(plugin)


def check_may_run(origin: str, plugins: Iterable[str], *, trust: bool = False) -> None:
    """Raise UserError for the first plugin that may not be loaded; `origin` is the file that refers to it."""
    for plugin in plugins:
        if not may_run(plugin, trust=trust):
            raise UserError(f"{origin}: refers to code ({plugin}), which runs only with --trust")
