"""`paceline pack SRC DST`: decodes every picture of a source once, into files that are memory-mapped from then on."""

from __future__ import annotations

import dataclasses
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from paceline.config.settings import RunSettings
from paceline.core.errors import NO_ROOM, UserError
from paceline.core.lock import InUse, Lock
from paceline.core.registry import is_path, load_class, names
from paceline.data.packing.format import MANIFEST, UNFINISHED
from paceline.data.packing.origin import describe
from paceline.data.packing.writer import begin, check_same, check_whole, fill, finish
from paceline.data.pixels import bytes_needed
from paceline.data.source import Source
from paceline.runs.config import resolve_settings

SECONDS_BETWEEN_LINES = 10.0  # where there is no terminal to draw a bar on
Shown = Callable[[int], None]


def pack(origin: str, destination: str, flags: Mapping[str, Any], assignments: Mapping[str, Any]) -> int:
    """Packs a folder, or a source that has a name; what is packed already is checked instead."""
    settings = _settings(origin, flags, assignments)
    source_class = load_class("source", settings.data, Source)
    sources = {split: source_class(split, settings) for split in source_class.splits_of(settings)}
    for source in sources.values():
        for note in source.notes:
            print(note)
    folder = Path(destination).expanduser()
    made_from = {"data": settings.data} | {name: str(value) for name, value in assignments.items()}
    splits = {split: describe(source) for split, source in sources.items()}
    if (folder / MANIFEST).is_file():
        return _check(folder, sources, splits, settings)
    _check_room(folder, sources)
    goes_on = begin(folder, splits, made_from)
    with _can_go_on(folder), _only_writer(folder):
        for split, source in sources.items():
            with _progress(f"{'going on' if goes_on else 'packing'}: {split}", len(source)) as shown:
                fill(source, folder / split, settings, shown)
        finish(folder, sources)
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    counts = ", ".join(f"{len(source):,} {split}" for split, source in sources.items())
    print(
        f"packed {counts} samples into {folder} ({size / 1e6:,.0f} MB); use it with --data packed --data-root {folder}"
    )
    return 0


def _settings(origin: str, flags: Mapping[str, Any], assignments: Mapping[str, Any]) -> RunSettings:
    chosen = dict(flags)
    if Path(origin).expanduser().is_dir():
        chosen = {"data": "photos", "data_root": origin} | chosen
    elif is_path(origin) or origin in names("source"):
        if chosen.setdefault("data", origin) != origin:
            raise UserError(f"--data {chosen['data']}: {origin} is no folder but the name of another source")
    else:
        raise UserError(f"pack {origin}: no such folder, and no source of that name ({', '.join(names('source'))})")
    run = resolve_settings("pack", [("flag", chosen), ("--set", assignments)])
    return dataclasses.replace(run, crop=0)


def _check(folder: Path, sources: Mapping[str, Source], splits: Mapping[str, Any], settings: RunSettings) -> int:
    """Looks at all that was packed before, and whether it was packed from this."""
    check_same(folder, splits)
    for split, source in sources.items():
        with _progress(f"checking: {split}", len(source)) as shown:
            check_whole(source, folder, split, settings, shown)
    print(f"{folder} was packed before, and all of it is whole")
    return 0


def _check_room(folder: Path, sources: Mapping[str, Source]) -> None:
    here = next(parent for parent in (folder, *folder.absolute().parents) if parent.is_dir())
    lying = sum(file.stat().st_size for file in folder.rglob("*.pixels"))
    needed, free = sum(map(bytes_needed, sources.values())) - lying, shutil.disk_usage(here).free
    if needed > free:
        raise UserError(f"pack: {needed / 1e9:.2g} GB do not fit in {folder}, where {free / 1e9:.2g} GB are free")


@contextmanager
def _can_go_on(folder: Path) -> Iterator[None]:
    """Says of a full disk and of Ctrl-C that nothing is lost."""
    try:
        yield
    except KeyboardInterrupt:
        raise KeyboardInterrupt("the same command goes on") from None
    except OSError as error:
        if error.errno in NO_ROOM:
            raise UserError(
                f"{folder}: {(error.strerror or 'no space left').lower()}; make room, and the same command goes on"
            ) from error
        raise


@contextmanager
def _only_writer(folder: Path) -> Iterator[None]:
    try:
        lock = Lock(folder)
    except InUse as owner:
        raise UserError(f"{folder}: another process ({owner}) is packing into it") from None
    try:
        if not (folder / UNFINISHED).is_file():
            raise UserError(f"{folder}: another process has just packed into it; the same command checks it")
        yield
    finally:
        lock.release(remove=True)


@contextmanager
def _progress(title: str, total: int) -> Iterator[Shown]:
    """A bar on a terminal, a line now and then elsewhere."""
    if sys.stdout.isatty():
        named = TextColumn("{task.description}", markup=False)
        with Progress(named, BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()) as bar:
            task = bar.add_task(title, total=total)
            yield lambda count: bar.update(task, completed=count)
        return
    said = time.monotonic()

    def line(count: int) -> None:
        nonlocal said
        if count == total or time.monotonic() - said > SECONDS_BETWEEN_LINES:
            said = time.monotonic()
            print(f"{title}: {count:,} of {total:,}", flush=True)

    yield line
