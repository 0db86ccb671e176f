"""What makes commands start faster: a cache of bytecode, and rarer garbage collection while modules are imported."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import MAGIC_NUMBER, cache_from_source, find_spec
from pathlib import Path

from paceline.core.files import writable_cache

# In some container images, only the modules that were imported during the build have bytecode.
SAMPLES = ("__init__.py", "_dynamo/symbolic_convert.py")  # of torch
CHECKS_SOURCE_HASH = 1  # flag in a bytecode file that stores a hash of the source code instead of its time and size
HEADER = 16  # bytes: magic number, flags, time and size of the source code
WRITES_NONE, PREFIX = "PYTHONDONTWRITEBYTECODE", "PYTHONPYCACHEPREFIX"


def keep_bytecode() -> None:
    """Make this process and its child processes use a cache of bytecode, if Python would compile torch every time."""
    spec = find_spec("torch") if sys.pycache_prefix is None else None
    if spec is None or spec.origin is None:
        return
    sources = [Path(spec.origin).parent / sample for sample in SAMPLES]
    if all(map(_is_kept, sources)) or not (folder := writable_cache("bytecode")) or not _make_private(folder):
        return
    sys.pycache_prefix, sys.dont_write_bytecode = str(folder), False
    os.environ[PREFIX] = str(folder)
    os.environ.pop(WRITES_NONE, None)


def _make_private(folder: Path) -> bool:
    """Deny other users access to a folder, because its bytecode will be executed; return whether this worked."""
    try:
        is_own = folder.stat().st_uid == os.geteuid()
        if is_own:
            folder.chmod(0o700)
    except OSError:  # for example, because the file system has no permissions
        return False
    return is_own


def _is_kept(source: Path) -> bool:
    """Return whether a module has valid bytecode beside its source code, or will have it after the next import."""
    try:
        return _has_bytecode(source) or (not sys.dont_write_bytecode and os.access(source.parent, os.W_OK))
    except OSError:  # this version of torch has no such module, or bytecode only
        return True


def _has_bytecode(source: Path) -> bool:
    stat = source.stat()
    file = Path(cache_from_source(str(source)))
    if not file.exists():
        return False
    with file.open("rb") as opened:
        header = opened.read(HEADER)
    flags, time, size = (int.from_bytes(header[start : start + 4], "little") for start in (4, 8, 12))
    is_current = flags & CHECKS_SOURCE_HASH or (time, size) == (int(stat.st_mtime) & 0xFFFFFFFF, stat.st_size)
    return header[:4] == MAGIC_NUMBER and bool(is_current)


NUM_NEW_OBJECTS = 100_000  # before a collection; Python's default is at most 2,000


@contextmanager
def collecting_rarely() -> Iterator[None]:
    """Collect garbage rarely inside the block, which creates many objects that all stay in use.

    Python would otherwise examine all existing objects again and again, which takes up to a fifth of the time.
    """
    thresholds = gc.get_threshold()
    gc.set_threshold(NUM_NEW_OBJECTS, *thresholds[1:])
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
