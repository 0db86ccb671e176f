"""A bounded cache of file blocks on the local disk, shared by all processes of a host.

    usage              total size of the blocks, changed only by the process that has locked byte 0 of `claims`
    claims             a file whose other bytes are locked, one per block that a process is downloading
    blocks/KEY/NUMBER  one block; KEY identifies a version of a remote file

A block is written to a temporary file and then renamed. Locks are released if a process dies. Old blocks are removed
before a new one is written, so the cache never exceeds its limit. Blocks have no checksums. The caller must
compare the content with its own checksum, because a power failure can damage a block.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

from paceline.core.errors import UserError
from paceline.core.files import WRITING, replacing

MIN_FREE_BYTES = 2**30  # space left free on the disk, so that checkpoints can still be written
FILLED_SHARE = 0.9  # fraction of the limit that is still used after old blocks were removed
LEFTOVER_SECONDS = 60.0  # an older temporary file belongs to a process that was killed
MAX_DIGITS = 20  # of the number in the file `usage`


class Block(NamedTuple):
    """One block of a remote file."""

    key: str  # identifies the file and its version
    number: int


class BlockCache:
    """Stores blocks in a folder, and removes the least recently used ones to stay within the limit."""

    def __init__(self, folder: Path, limit: int) -> None:
        self.folder, self.limit, self._blocks = folder, limit, str(folder / "blocks")
        try:
            (folder / "blocks").mkdir(parents=True, exist_ok=True)
            # This file stays open: closing it would release the locks of this process.
            self._claims = os.open(folder / "claims", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise UserError(
                f"cache folder {folder}: {error.strerror}; set shard_cache to a folder that can be written to"
            ) from None

    def has(self, block: Block) -> bool:
        """Return whether a block is stored."""
        return os.path.exists(self._path(block))

    def read(self, block: Block, start: int, stop: int) -> bytes | None:
        """Return a range of bytes in a block; None if the block is not stored or is too short."""
        try:
            opened = os.open(self._path(block), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            return None
        try:
            content = os.pread(opened, stop - start, start)
            with suppress(PermissionError):  # the block belongs to another user
                os.utime(opened)  # marks the block as recently used
        except OSError:  # for example, the disk is damaged
            return None
        finally:
            os.close(opened)
        return content if len(content) == stop - start else None

    def write(self, block: Block, content: bytes) -> None:
        """Store a block, if there is room for it; raise OSError if the disk is full or not writable."""
        path = Path(self._path(block))
        with self._usage() as usage:
            if self._make_room_for(len(content), usage):
                path.parent.mkdir(exist_ok=True)
                with replacing(path, durable=False) as temporary:
                    temporary.write_bytes(content)

    def drop(self, block: Block) -> None:
        """Remove a block, for example because it is damaged."""
        Path(self._path(block)).unlink(missing_ok=True)

    def claim(self, block: Block) -> bool:
        """Return whether this process may download a block, because no other process is downloading it."""
        try:
            fcntl.lockf(self._claims, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, _position(block))
        except BlockingIOError:
            return False
        except OSError:  # the file system does not support locks: two processes may download the same block
            return True
        return True

    def release(self, block: Block) -> None:
        """Let other processes download a block."""
        with suppress(OSError):
            fcntl.lockf(self._claims, fcntl.LOCK_UN, 1, _position(block))

    def _path(self, block: Block) -> str:
        return f"{self._blocks}/{block.key}/{block.number}"  # faster than pathlib

    def _make_room_for(self, size: int, usage: int) -> bool:
        """Count a new block, and first remove old ones if necessary; return whether there is room for the block."""
        digits = os.pread(usage, MAX_DIGITS, 0)
        total = int(digits) if digits.isdigit() else self._reduce(self.limit)
        lacking = MIN_FREE_BYTES + size - shutil.disk_usage(self.folder).free
        if total + size > self.limit or lacking > 0:
            # Remove more than necessary, because searching for the oldest blocks is slow.
            spare = int(self.limit * (1 - FILLED_SHARE))
            total = self._reduce(min(self.limit - spare - size, total - lacking - spare if lacking > 0 else total))
            lacking = MIN_FREE_BYTES + size - shutil.disk_usage(self.folder).free
        fits = total + size <= self.limit and lacking <= 0
        os.ftruncate(usage, 0)
        os.pwrite(usage, b"%d" % (total + size * fits), 0)
        return fits

    @contextmanager
    def _usage(self) -> Iterator[int]:
        opened = os.open(self.folder / "usage", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
        try:
            # Unlike flock, this lock is not inherited by a process that is forked while the lock is held.
            with _threads.lock:
                with suppress(OSError):  # the file system does not support locks
                    fcntl.lockf(self._claims, fcntl.LOCK_EX, 1, 0)
                try:
                    yield opened
                finally:
                    with suppress(OSError):
                        fcntl.lockf(self._claims, fcntl.LOCK_UN, 1, 0)
        finally:
            os.close(opened)

    def _reduce(self, target: int) -> int:
        """Remove the least recently used blocks until the rest fits in `target` bytes; return the size of the rest."""
        found = sorted(self._stored())
        total = sum(size for _, size, _ in found)
        for _, size, path in found:
            if total <= target:
                break
            with suppress(FileNotFoundError):
                os.unlink(path)
            total -= size
        for folder in os.scandir(self.folder / "blocks"):
            with suppress(OSError):
                os.rmdir(folder)  # fails unless the folder is empty
        return total

    def _stored(self) -> Iterator[tuple[int, int, str]]:
        """Yield the time of the last use, the size and the path of every block; remove old temporary files."""
        for folder in os.scandir(self.folder / "blocks"):
            for entry in _entries(folder.path):
                with suppress(FileNotFoundError):
                    status = entry.stat(follow_symlinks=False)
                    if entry.name.endswith(WRITING) and time.time() - status.st_mtime > LEFTOVER_SECONDS:
                        os.unlink(entry.path)
                    else:
                        yield status.st_mtime_ns, status.st_size, entry.path


def _entries(folder: str) -> list[os.DirEntry[str]]:
    """Return the files in a folder; none if it is a file, or if another program has removed it."""
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except (FileNotFoundError, NotADirectoryError):
        return []


class _Threads:
    """A lock for the threads of this process. A forked process needs a new one: its parent may hold the lock."""

    def __init__(self) -> None:
        self.renew()
        os.register_at_fork(after_in_child=self.renew)

    def renew(self) -> None:
        """Create the lock."""
        self.lock = threading.Lock()


_threads = _Threads()


def _position(block: Block) -> int:
    """Return the byte of the file `claims` that stands for a block."""
    return 1 + int.from_bytes(sha256(f"{block.key} {block.number}".encode()).digest()[:6])
