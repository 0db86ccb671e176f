"""Reads ranges of files. Blocks of remote files are cached on the local disk, shared by all processes."""

from __future__ import annotations

import fcntl
import os
import shutil
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

from paceline.core.background import Background
from paceline.core.errors import UserError
from paceline.core.files import WRITING, replacing
from paceline.core.storage.files import Span, Storage, StoredFile
from paceline.core.text import print_line

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
            with self._usage():
                pass
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
        """Open and lock the file with the total size of all blocks."""
        opened = os.open(self.folder / "usage", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
        try:
            with suppress(OSError):  # the file system does not support locks
                fcntl.flock(opened, fcntl.LOCK_EX)
            yield opened
        finally:
            with suppress(OSError):  # explicitly, because a process that was forked in the meantime has the file open
                fcntl.flock(opened, fcntl.LOCK_UN)
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


BLOCK_BYTES = 2**18
MAX_REQUEST_BYTES = 2**23  # adjacent blocks are read with one request, up to this size
MAX_HELD_BYTES = 2**25  # maximum size of blocks that are downloaded together


class Reader:
    """Reads ranges of files in a storage, from the cache if possible. It can be used in forked processes."""

    def __init__(
        self, storage: Storage, files: Sequence[StoredFile], cache: BlockCache | None, wait_seconds: float
    ) -> None:
        self.storage, self.cache, self.wait_seconds = storage, None if storage.is_local else cache, wait_seconds
        self._keys = {file.place: key_of(storage, file) for file in files}
        self._files = {key_of(storage, file): file for file in files}
        self._process = _Process()

    def read(self, spans: Sequence[Span]) -> list[bytes]:
        """Return the bytes of each span. Adjacent blocks that are not in the cache are read with one request."""
        cache = self.cache
        if cache is None:
            return self.storage.read(spans, self.wait_seconds)
        contents: list[bytes] = []
        for part, missing in self._parts(cache, spans):
            downloaded = self._download(cache, missing, self.wait_seconds)
            for block in missing:
                if block not in downloaded and (elsewhere := self._here().running.get(block)):
                    elsewhere.wait()
            contents += [b"".join(self._pieces(cache, span, downloaded)) for span in part]
        return contents

    def prefetch(self, spans: Sequence[Span]) -> None:
        """Start downloading blocks that are not in the cache; return without waiting."""
        cache = self.cache
        if cache is not None and (missing := [block for block in self._blocks(spans) if not cache.has(block)]):
            self._here().prefetching.add(partial(self._prefetch, cache, missing))

    def forget(self, span: Span) -> None:
        """Remove a span from the cache, because its content does not match its checksum."""
        if self.cache is not None:
            for block in self._blocks([span]):
                self.cache.drop(block)

    def _prefetch(self, cache: BlockCache, blocks: list[Block]) -> None:
        size = MAX_HELD_BYTES // BLOCK_BYTES
        for start in range(0, len(blocks), size):
            with suppress(Exception):  # the error is reported when the block is read
                self._download(cache, blocks[start : start + size], 0.0)

    def _blocks(self, spans: Iterable[Span]) -> list[Block]:
        """Return the blocks that contain the spans, in order, each once."""
        blocks = (
            Block(self._keys[span.place], number)
            for span in spans
            for number in range(span.start // BLOCK_BYTES, -(-span.stop // BLOCK_BYTES))
        )
        return list(dict.fromkeys(blocks))

    def _parts(self, cache: BlockCache, spans: Sequence[Span]) -> Iterator[tuple[list[Span], list[Block]]]:
        """Split a list of spans so that the blocks to download for each part fit in memory; yield both."""
        part: list[Span] = []
        missing: dict[Block, None] = {}
        for span in spans:
            part.append(span)
            missing |= dict.fromkeys(block for block in self._blocks([span]) if not cache.has(block))
            if len(missing) * BLOCK_BYTES >= MAX_HELD_BYTES:
                yield part, list(missing)
                part, missing = [], {}
        if part:
            yield part, list(missing)

    def _pieces(self, cache: BlockCache, span: Span, found: dict[Block, bytes]) -> Iterator[bytes]:
        for block in self._blocks([span]):
            begin = block.number * BLOCK_BYTES
            start, stop = max(span.start - begin, 0), min(span.stop - begin, BLOCK_BYTES)
            piece = found[block][start:stop] if block in found else cache.read(block, start, stop)
            yield piece if piece is not None else self._read_again(cache, block, begin + start, begin + stop)

    def _read_again(self, cache: BlockCache, block: Block, start: int, stop: int) -> bytes:
        """Read part of a block that another process has just removed from the cache, or that is truncated."""
        cache.drop(block)
        file = self._files[block.key]
        return self.storage.read([Span(file.place, start, stop)], self.wait_seconds)[0]

    def _download(self, cache: BlockCache, blocks: Sequence[Block], wait_seconds: float) -> dict[Block, bytes]:
        """Download blocks into the cache, except those that another thread is downloading; return their contents."""
        here, done = self._here(), threading.Event()
        with here.lock:
            mine = [block for block in blocks if block not in here.running and not cache.has(block)]
            here.running |= dict.fromkeys(mine, done)
        downloaded: dict[Block, bytes] = {}
        try:
            runs = list(_runs(mine))
            spans = [self._span(run) for run in runs]
            for run, content in zip(runs, self.storage.read(spans, wait_seconds) if spans else (), strict=True):
                for row, block in enumerate(run):
                    downloaded[block] = content[row * BLOCK_BYTES : (row + 1) * BLOCK_BYTES]
                    self._store(cache, block, downloaded[block])
        finally:
            with here.lock:
                for block in mine:
                    del here.running[block]
            done.set()
        return downloaded

    def _store(self, cache: BlockCache, block: Block, content: bytes) -> None:
        try:
            cache.write(block, content)
        except OSError as error:
            if not self._here().reported:
                self._here().reported = True
                print_line(f"cache folder {cache.folder}: {error.strerror}; data is not cached; free up space")

    def _span(self, run: Sequence[Block]) -> Span:
        file = self._files[run[0].key]
        return Span(file.place, run[0].number * BLOCK_BYTES, min((run[-1].number + 1) * BLOCK_BYTES, file.size))

    def _here(self) -> _Process:
        if self._process.pid != os.getpid():
            self._process = _Process()  # threads and locks of the parent process do not exist in a forked process
        return self._process


class _Process:
    """The downloads that are running in one process, and its prefetching thread."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.reported = False  # whether this process has reported that the cache cannot be written
        self.lock, self.running = threading.Lock(), dict[Block, threading.Event]()
        self.prefetching = Background("prefetch")


def key_of(storage: Storage, file: StoredFile) -> str:
    """Return a key for a version of a file; a changed file has a different key."""
    return sha256(os.fsencode(f"{storage.url}\n{file.place}\n{file.size}\n{file.version}")).hexdigest()[:32]


def _runs(blocks: Iterable[Block]) -> Iterator[list[Block]]:
    """Yield lists of adjacent blocks that can be read with one request."""
    run: list[Block] = []
    for block in sorted(blocks):
        is_next = bool(run) and block == (run[-1].key, run[-1].number + 1)
        if not is_next or len(run) * BLOCK_BYTES >= MAX_REQUEST_BYTES:
            if run:
                yield run
            run = []
        run.append(block)
    if run:
        yield run
