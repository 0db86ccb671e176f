"""Makes a packed folder of a source, in steps that can be taken again after any end."""

from __future__ import annotations

import dataclasses
import errno
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import torch

from paceline.config.settings import RunSettings
from paceline.core.checksums import checksum_of_file
from paceline.core.errors import UserError
from paceline.data.loaders.workers import Workers
from paceline.data.packing.format import (
    MANIFEST,
    PLACE,
    UNFINISHED,
    Layout,
    PackedSplit,
    load_manifest,
    pixels_file,
    read_manifest,
    write_json,
    write_manifest,
)
from paceline.data.packing.origin import difference, only_reading_tells, sha256_of_files
from paceline.data.pixels import bytes_needed
from paceline.data.source import Sample, Source, decodes, has_one_size
from paceline.data.tickets import in_order
from paceline.data.transfer import channels_last

BYTES_PER_READ = 8 * 2**20
Told = Callable[[int], None]  # how many samples are done


def begin(folder: Path, splits: Mapping[str, Any], made_from: Mapping[str, Any]) -> bool:
    """Makes the folder ready to be filled; true where a part of the same is there already."""
    file = folder / UNFINISHED
    if file.is_file():
        kept = load_manifest(file, folder)
        differs = difference(kept["splits"], splits)
        if not differs and kept["made_from"] != made_from:
            differs = f"it was begun with {' '.join(f'{name}={value}' for name, value in kept['made_from'].items())}"
        if differs:
            raise _another(folder, differs)
        return True
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder}: is there and no unfinished pack; name a folder that is new or empty")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_manifest(file, made_from, splits)
    except OSError as error:
        raise UserError(f"{folder}: {error.strerror}; name a folder that can be made and written") from error
    return False


def fill(source: Source, folder: Path, settings: RunSettings, done: Told) -> None:
    """Packs a split into its folder, from where an earlier try stopped; `done` is told how many samples lie there."""
    folder.mkdir(exist_ok=True)
    layout = Layout.of(source)
    partial = folder / "index.partial"
    with ExitStack() as stack:
        rows = stack.enter_context(open(partial, "ab", buffering=0))
        files = [stack.enter_context(open(pixels_file(folder, name), "ab")) for name in layout.pictures]
        index = _whole_rows(partial, layout)
        ends = [_ends(index, number, channels) for number, channels in enumerate(layout.pictures.values())]
        for end, file in zip(ends, files, strict=True):
            index = index[: np.searchsorted(end, os.fstat(file.fileno()).st_size, side="right")]
        os.truncate(partial, index.nbytes)
        for end, file in zip(ends, files, strict=True):
            os.truncate(file.fileno(), int(end[len(index) - 1]) if len(index) else 0)
            file.seek(0, os.SEEK_END)
        start = 0 if only_reading_tells(source) else len(index)
        done(start)
        for number, sample in enumerate(_samples(source, start, settings), start):
            if number < len(index):
                _compare(sample, index[number], layout, source.name_of(number), folder.parent)
                done(number + 1)
                continue
            row = _row(sample, layout, [file.tell() for file in files])
            for name, file in zip(layout.pictures, files, strict=True):
                file.write(np.ascontiguousarray(sample[name]).data)
                file.flush()
            if rows.write(row.tobytes()) != row.nbytes:  # last: a row stands for a whole sample
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            done(number + 1)
        for file in files:
            os.fsync(file.fileno())


def finish(folder: Path, sources: Mapping[str, Source]) -> None:
    """Turns filled folders into a packed one."""
    manifest = load_manifest(folder / UNFINISHED, folder)
    for split, source in sources.items():
        here, about = folder / split, manifest["splits"][split]
        if sha256_of_files(source) != about["files_sha256"]:
            raise _another(folder, f"{split}: files were changed while they were packed")
        layout = Layout.of(source)
        if (here / "index.partial").is_file():
            np.save(here / "index.npy", _whole_rows(here / "index.partial", layout))
        write_json(here / "names.json", [source.name_of(index) for index in range(len(source))])
        listed: dict[str, dict[str, Any]] = {}
        for file in (pixels_file(here, name) for name in layout.pictures):
            listed[file.name] = {"bytes": file.stat().st_size}
        for file in (here / "index.npy", here / "names.json"):
            listed[file.name] = {"bytes": file.stat().st_size, "sha256": checksum_of_file(file)}
        about["files"] = listed
    write_manifest(folder / MANIFEST, manifest["made_from"], manifest["splits"])
    (folder / UNFINISHED).unlink()
    for split in sources:
        (folder / split / "index.partial").unlink(missing_ok=True)


def check_same(folder: Path, splits: Mapping[str, Any]) -> None:
    """Refuses a finished folder that was packed from anything but this."""
    differs = difference(read_manifest(folder)["splits"], splits)
    if differs:
        raise _another(folder, differs)


def check_whole(source: Source, folder: Path, split: str, settings: RunSettings, done: Told) -> None:
    """Looks at every pixel of a packed split, and at all of the source where nothing less tells what it holds."""
    packed = PackedSplit(folder, split)
    samples = _samples(source, 0, settings) if only_reading_tells(source) else None
    for number in range(len(packed.index)):
        packed.check(number)
        if samples is not None:
            _compare(next(samples), packed.index[number], packed.layout, packed.names[number], folder)
        done(number + 1)


def _another(folder: Path, differs: str) -> UserError:
    return UserError(
        f"{folder}: holds a pack of another source, or of this one before it was changed ({differs}); "
        f"remove {folder}, then pack again, or name another folder"
    )


def _samples(source: Source, start: int, settings: RunSettings) -> Iterator[Sample]:
    """The samples from one on, read ahead by worker processes where they have to be decoded."""
    if not decodes(source):
        settings = dataclasses.replace(settings, workers=0)
    together = max(1, BYTES_PER_READ * len(source) // bytes_needed(source)) if has_one_size(source) else 1
    reader = Workers(source, torch.device("cpu"), settings)
    starts = range(start, len(source), together)
    try:
        for piece in reader.load(in_order(low, min(low + together, len(source))) for low in starts):
            fields = {name: field.numpy() for name, field in channels_last(piece).items()}
            for row in range(len(fields["index"])):
                yield {name: field[row] for name, field in fields.items()}
    finally:
        reader.close()


def _row(sample: Sample, layout: Layout, offsets: Sequence[int]) -> np.ndarray:
    """A sample's row of the index, its pictures lying at these places."""
    row: list[int] = []
    for name, offset in zip(layout.pictures, offsets, strict=True):
        height, width, _ = sample[name].shape
        row += [offset, height, width, crc32(np.ascontiguousarray(sample[name]).data)]
    return np.array(row + [int(sample[name]) for name in layout.numbers], dtype=np.int64)


def _compare(sample: Sample, kept: np.ndarray, layout: Layout, name: str, folder: Path) -> None:
    """Refuses to go on where a sample is no longer what was packed."""
    offsets = kept[: len(layout.pictures) * len(PLACE) : len(PLACE)].tolist()
    if not np.array_equal(_row(sample, layout, offsets), kept):
        raise _another(folder, f"{name} differs")


def _whole_rows(file: Path, layout: Layout) -> np.ndarray:
    width = len(layout.columns)
    rows = np.frombuffer(file.read_bytes()[: file.stat().st_size // (8 * width) * 8 * width], dtype=np.int64)
    return rows.reshape(-1, width)


def _ends(index: np.ndarray, picture: int, channels: int) -> np.ndarray:
    """Where each picture of a field ends."""
    offset, height, width, _ = index[:, picture * len(PLACE) : (picture + 1) * len(PLACE)].T
    return offset + height * width * channels
