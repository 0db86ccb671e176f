"""Imports slow modules in a thread while the main thread waits for a disk or a GPU.

A process that is forked in the meantime could wait forever for a lock of the import, so fork only after
`finish_imports`.
"""

from __future__ import annotations

from collections.abc import Callable
from threading import Thread

_threads: list[Thread] = []


def import_in_background(load: Callable[[], None]) -> None:
    """Run a function that imports modules in a thread."""
    thread = Thread(target=load, name="paceline-import", daemon=True)
    _threads.append(thread)
    thread.start()


def finish_imports() -> None:
    """Wait until all imports in the background have ended."""
    while _threads:
        _threads[-1].join()
        _threads.pop()
