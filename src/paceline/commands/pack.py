"""`paceline pack SRC DST`: decode every image in a source once, into a packed folder or tar files."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from paceline.config.settings import RunSettings
from paceline.core.errors import DISK_FAILED, UserError
from paceline.core.files import InUse, Lock, remove_leftovers, user_path, write_file
from paceline.core.registry import is_path, load_class, names
from paceline.core.terminal import Counter, activity
from paceline.core.text import print_line
from paceline.core.types import SettingValues
from paceline.data.file_lists import not_used_file, write_not_used
from paceline.data.packing import (
    MANIFEST,
    UNFINISHED,
    Manifest,
    SplitRecord,
    begin,
    check_same,
    check_shard,
    check_whole,
    describe,
    fill,
    finish,
    write_shards,
)
from paceline.data.shards import MANIFEST as SHARDS_MANIFEST
from paceline.data.shards import encode_manifest, parse_manifest
from paceline.data.source import Source, bytes_needed, check_split
from paceline.data.worker_pool import reporting_dead_workers
from paceline.runs.recipe import resolve_settings

ORIGIN = "shards_origin.json"  # describes the source of shards, to detect changes
MEGABYTE = 10**6


def pack(
    origin: str, destination: str, flags: SettingValues, assignments: SettingValues, *, train_only: bool = False
) -> int:
    """Pack a folder or a named source; if the destination is already complete, check it instead."""
    folder = user_path(destination)
    settings, sources = open_origin(origin, folder, flags, assignments, train_only=train_only)
    splits = {split: describe(source) for split, source in sources.items()}
    if (folder / MANIFEST).is_file():
        check_same(folder / MANIFEST, splits)
        for split, counter in _counted(sources, "checking"):
            check_whole(sources[split], folder, split, settings.workers, counter.update)
        return _report_complete(folder)
    _check_space(folder, sources)
    with writing(folder, splits, {"data": settings.data} | {name: str(value) for name, value in assignments.items()}):
        for split, counter in _counted(sources, "packing"):
            fill(sources[split], folder / split, splits[split], settings.workers, counter.update)
        finish(folder, sources)
    print_line(f"packed {_describe(sources, folder)}; use it with --data packed --data-root {folder}")
    return 0


def pack_to_shards(
    origin: str,
    destination: str,
    flags: SettingValues,
    assignments: SettingValues,
    shard_mb: int,
    *,
    train_only: bool = False,
) -> int:
    """Write a source into shards; if the destination is already complete, check it instead."""
    folder = user_path(destination)
    settings, sources = open_origin(origin, folder, flags, assignments, train_only=train_only)
    splits = {split: describe(source) for split, source in sources.items()}
    if (folder / SHARDS_MANIFEST).is_file():
        check_same(folder / ORIGIN, splits)
        complete = parse_manifest((folder / SHARDS_MANIFEST).read_bytes(), str(folder)).splits
        for split, counter in _counted(sources, "checking"):
            for name in complete.get(split, ()):
                counter.update(check_shard(folder, name))
        return _report_complete(folder)
    made_from = {"data": settings.data, "shard_mb": str(shard_mb)}
    made_from |= {name: str(value) for name, value in assignments.items()}
    decoded = bool(settings.size or settings.channels)
    shards: dict[str, list[str]] = {}
    with writing(folder, splits, made_from):
        for split, counter in _counted(sources, "writing"):
            written = write_shards(sources[split], folder, split, shard_mb * MEGABYTE, decoded, counter.update)
            shards[split] = list(written)
        Manifest(made_from, splits).write(folder / ORIGIN)
        spec = sources["train"].spec
        write_file(folder / SHARDS_MANIFEST, encode_manifest(shards, spec.class_names, spec.flip_allowed))
        (folder / UNFINISHED).unlink()
        remove_leftovers(folder)
    if any(source.groups for source in sources.values()):
        print_line("group_by: shards do not store groups, so validation samples are held out at random")
    num_shards = sum(map(len, shards.values()))
    count = f"{num_shards:,} shard{'s' * (num_shards != 1)} in "
    print_line(f"wrote {_describe(sources, folder, count)}; use them with --data shards --data-root {folder}")
    return 0


def _counted(sources: Mapping[str, Source], verb: str) -> Iterator[tuple[str, Counter]]:
    """Yield each split, with a counter that shows how many of its samples are done."""
    for split, source in sources.items():
        with Counter(f"{verb}: {split}", len(source)) as counter:
            yield split, counter


def _report_complete(folder: Path) -> int:
    print_line(f"{folder} is already complete; all checksums match")
    return 0


def open_origin(
    origin: str, folder: Path, flags: SettingValues, assignments: SettingValues, *, train_only: bool
) -> tuple[RunSettings, dict[str, Source]]:
    """Open the source to pack; return its settings and splits. Print notes and list the files that are not used.

    With `train_only`, there is only a training split, and images that would be held out for testing are part of it.
    """
    settings = _settings(origin, flags, assignments)
    source_class = load_class("source", settings.data, Source)
    activity(f"opening the data source {settings.data}")
    settings = source_class.measure_whole(settings) if train_only else settings
    splits = ("train",) if train_only else source_class.splits_of(settings)
    sources = {split: source_class(split, settings) for split in splits}
    for split, source in sources.items():
        check_split(source, split, settings.data)
    for note in dict.fromkeys(note for source in sources.values() for note in source.notes):
        print_line(note)
    not_used = dict.fromkeys(file for source in sources.values() for file in source.not_used)
    for note in write_not_used(not_used_file(folder), list(not_used)):
        print_line(note)
    return settings, sources


def _describe(sources: Mapping[str, Source], folder: Path, shards: str = "") -> str:
    counts = ", ".join(f"{len(source):,} {split}" for split, source in sources.items())
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    return f"{counts} samples into {shards}{folder} ({size / 1e6:,.0f} MB)"


def _settings(origin: str, flags: SettingValues, assignments: SettingValues) -> RunSettings:
    chosen, path = dict(flags), user_path(origin)
    is_name = origin in names("source") and "data_root" in chosen  # even if there is a folder with this name
    if not is_name and (path.is_dir() or path.suffix == ".npz"):
        if "data_root" in chosen:
            raise UserError(f"--data-root {chosen['data_root']}: {origin} is packed; leave one of the two out")
        chosen = {"data": "npz" if path.suffix == ".npz" else "photos", "data_root": origin} | chosen
    elif is_path(origin) or origin in names("source"):
        if chosen.setdefault("data", origin) != origin:
            raise UserError(f"--data {chosen['data']}: {origin} is the name of a different source; leave --data out")
    else:
        raise UserError(f"pack {origin}: no such folder or source; sources: {', '.join(names('source'))}")
    run = resolve_settings("pack", [("flag", chosen), ("--set", assignments)])
    return dataclasses.replace(run, crop=0)


def _check_space(folder: Path, sources: Mapping[str, Source]) -> None:
    here = next(parent for parent in (folder, *folder.absolute().parents) if parent.is_dir())
    present = sum(file.stat().st_size for file in folder.rglob("*.pixels"))
    needed, free = sum(map(bytes_needed, sources.values())) - present, shutil.disk_usage(here).free
    if needed > free:
        raise UserError(
            f"pack: needs {needed / 1e9:.2g} GB, but only {free / 1e9:.2g} GB is free in {folder}; free up space"
        )


@contextmanager
def writing(folder: Path, splits: Mapping[str, SplitRecord], made_from: Mapping[str, str]) -> Iterator[None]:
    """Begin or resume writing a folder, which no other process may write; explain how to resume after an error."""
    if begin(folder, splits, made_from):
        print_line(f"resuming {folder}")
    try:
        lock = Lock(folder)
    except InUse as owner:
        raise UserError(
            f"{folder}: another process ({owner}) is writing to this folder; wait for it to finish"
        ) from None
    except OSError as error:
        raise UserError(
            f"{folder}: cannot be locked ({error.strerror}); choose a folder on another file system"
        ) from None
    try:
        if not (folder / UNFINISHED).is_file():
            raise UserError(
                f"{folder}: another process has just finished packing; run the same command again to check the result"
            )
        with reporting_dead_workers():
            yield
    except KeyboardInterrupt:
        raise KeyboardInterrupt("run the same command again to resume") from None
    except OSError as error:
        if not folder.is_dir():
            raise UserError(f"{folder}: was removed during packing; run the same command again") from error
        if error.errno in DISK_FAILED:
            what = (error.strerror or "no space left").lower()
            raise UserError(f"{folder}: {what}; free up space, then run the same command again to resume") from error
        raise
    finally:
        lock.release(remove=True)
