"""Loads the index of every shard, and scans shards that have none. A killed scan resumes at the next shard."""

from __future__ import annotations

import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from paceline.core.activity import activity, counted
from paceline.core.errors import UserError
from paceline.core.files import write_file
from paceline.core.lock import Lock
from paceline.core.printable import printable
from paceline.core.small_files import read_bounded
from paceline.core.storage.files import Span, StoredFile
from paceline.core.storage.reader import Reader, key_of
from paceline.core.user_cache import user_cache
from paceline.data.shards.catalog import Catalog
from paceline.data.shards.index import MAX_INDEX_BYTES, SUFFIX, ShardIndex
from paceline.data.shards.scan import scan

MIN_THREADS = 4  # threads mostly wait for the storage


def load_indexes(
    catalog: Catalog, shards: Sequence[StoredFile], reader: Reader, folder: Path, num_threads: int
) -> list[tuple[StoredFile, ShardIndex]]:
    """Return every shard with its index. New indexes are stored in the folder."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        if not folder.is_relative_to(user_cache()):  # the user chose the folder
            raise UserError(f"cache folder {folder}: {error.strerror}; choose one that can be written to") from None
    shown = f"reading the index of each shard ({catalog.storage.shown})"
    activity(shown)
    with ThreadPoolExecutor(max(MIN_THREADS, num_threads)) as threads:
        found = threads.map(lambda shard: _load(catalog, shard, reader, folder), shards)
        return list(zip(shards, counted(found, shown, len(shards)), strict=True))


def _load(catalog: Catalog, shard: StoredFile, reader: Reader, folder: Path) -> ShardIndex:
    file = folder / f"{key_of(catalog.storage, shard)}.json"
    is_listed = catalog.indexed is not None and shard.name in catalog.indexed
    index = (_beside(catalog, shard) if is_listed else None) or _kept(file, shard)
    if index is None and catalog.indexed is None:
        index = _beside(catalog, shard)
    if index is not None:
        return index
    try:
        lock = Lock(folder, f".{file.stem}.lock", wait_seconds=math.inf)  # the processes of a host scan each shard once
    except OSError:  # the user's cache cannot be written, so each process scans the shard
        return scan(reader, shard)
    try:
        index = _kept(file, shard) or _scan(catalog, shard, reader)
        with suppress(OSError):  # if the disk is full, the shard is scanned again next time
            write_file(file, index.encode(), durable=False)
    finally:
        lock.release(remove=True)
    return index


def _scan(catalog: Catalog, shard: StoredFile, reader: Reader) -> ShardIndex:
    """Scan a shard; raise UserError if it is replaced meanwhile, because its index would mix both versions."""
    before = catalog.storage.describe_files([shard.name])
    index = scan(reader, shard)
    if index.problem or not index.members or any(member.problem for member in index.members):
        reader.forget(Span(shard.place, 0, shard.size))  # the cached copy may be damaged
        index = scan(reader, shard)
    if catalog.storage.describe_files([shard.name]) != before or before[0].size != shard.size:
        raise UserError(
            f"{catalog.storage.shown}: {printable(shard.name)}: its size, ETag or modification time changed while it "
            "was read; run the same command again when the shard is complete"
        )
    return index


def _kept(file: Path, shard: StoredFile) -> ShardIndex | None:
    """Return an index that an earlier scan stored; None if there is none or it is damaged."""
    try:
        index = ShardIndex.parse(read_bounded(file, MAX_INDEX_BYTES))
    except (OSError, ValueError):
        return None
    return index if index.size == shard.size else None


def _beside(catalog: Catalog, shard: StoredFile) -> ShardIndex | None:
    """Return the index beside a shard, if there is one; raise UserError if it is damaged or the shard has changed."""
    name = shard.name + SUFFIX
    content = catalog.storage.read_file(name, MAX_INDEX_BYTES)
    shown = f"{catalog.storage.shown}: {printable(name)}"
    if content is None:
        return None
    try:
        index = ShardIndex.parse(content)
    except ValueError as error:
        raise UserError(f"{shown}: {error}; delete it, so that the shard is scanned instead") from None
    if index.size != shard.size:
        raise UserError(
            f"{shown}: made for a shard of {index.size:,} bytes, but {printable(shard.name)} has {shard.size:,}; "
            "restore the shard, or delete its index"
        )
    return index
