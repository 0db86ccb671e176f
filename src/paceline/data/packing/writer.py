"""Writes a packed folder; after an interruption, packing resumes where it stopped."""

from __future__ import annotations

import dataclasses
import errno
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from paceline.core.checksums import checksum_of_file
from paceline.core.errors import UserError
from paceline.core.files import WRITING, remove_leftovers, replacing, write_json
from paceline.data.packing.format import GROUPS, PackedSplit, pixels_file
from paceline.data.packing.manifest import (
    MANIFEST,
    PLACE,
    UNFINISHED,
    FileRecord,
    Layout,
    Manifest,
    SplitRecord,
    load_manifest,
    read_manifest,
)
from paceline.data.packing.origin import difference, must_be_read, sha256_of_files
from paceline.data.source import Sample, Source
from paceline.data.whole_source import read_in_order

BYTES_PER_READ = 8 * 2**20
PARTIAL = "index.partial"  # index rows written so far
Progress = Callable[[int], None]  # called with the number of finished samples


def begin(folder: Path, splits: Mapping[str, SplitRecord], made_from: Mapping[str, str]) -> bool:
    """Prepare the folder for packing; return whether it already contains part of the same pack."""
    file = folder / UNFINISHED
    if file.is_file():
        kept = load_manifest(file, folder)
        differs = difference(kept.splits, splits)
        if not differs and kept.made_from != made_from:
            differs = (
                f"packing was started with {' '.join(f'{name}={value}' for name, value in kept.made_from.items())}"
            )
        if differs:
            raise _another(folder, differs)
        return True
    if folder.exists() and (not folder.is_dir() or any(path.suffix != WRITING for path in folder.iterdir())):
        raise UserError(f"{folder}: already exists and is not an unfinished pack; choose a new or empty folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        Manifest(made_from, splits).write(file)
    except OSError as error:
        raise UserError(f"{folder}: {error.strerror}; choose a folder that can be created and written to") from error
    return False


def fill(source: Source, folder: Path, num_workers: int, done: Progress) -> None:
    """Pack a split into its folder, resuming where an earlier attempt stopped."""
    folder.mkdir(exist_ok=True)
    layout = Layout.of(source)
    partial = folder / PARTIAL
    with ExitStack() as stack:
        rows = stack.enter_context(open(partial, "ab", buffering=0))
        files = [stack.enter_context(open(pixels_file(folder, name), "ab")) for name in layout.images]
        index = _whole_rows(partial, layout)
        itemsize = np.dtype(source.spec.dtype).itemsize
        ends = [_ends(index, number, channels * itemsize) for number, channels in enumerate(layout.images.values())]
        for end, file in zip(ends, files, strict=True):
            index = index[: np.searchsorted(end, os.fstat(file.fileno()).st_size, side="right")]
        os.truncate(partial, index.nbytes)
        for end, file in zip(ends, files, strict=True):
            os.truncate(file.fileno(), int(end[len(index) - 1]) if len(index) else 0)
            file.seek(0, os.SEEK_END)
        start = 0 if must_be_read(source) else len(index)
        done(start)
        for number, sample in enumerate(_samples(source, start, num_workers), start):
            if number < len(index):
                _compare(sample, index[number], layout, source.name_of(number), folder.parent)
                done(number + 1)
                continue
            row = _row(sample, layout, [file.tell() for file in files])
            for name, file in zip(layout.images, files, strict=True):
                file.write(np.ascontiguousarray(sample[name]).data)
                file.flush()
            if rows.write(row.tobytes()) != row.nbytes:  # written last: a row marks a complete sample
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            done(number + 1)
        for file in files:
            os.fsync(file.fileno())


def finish(folder: Path, sources: Mapping[str, Source]) -> None:
    """Write the indexes and the manifest, which completes the pack, and remove temporary files."""
    manifest = load_manifest(folder / UNFINISHED, folder)
    splits = {}
    for split, source in sources.items():
        here, record = folder / split, manifest.splits[split]
        if sha256_of_files(source) != record.files_sha256:
            raise _another(folder, f"{split}: files changed during packing")
        splits[split] = dataclasses.replace(record, files=_finish_split(here, source))
    Manifest(manifest.made_from, splits).write(folder / MANIFEST)
    (folder / UNFINISHED).unlink()
    for split in sources:
        (folder / split / PARTIAL).unlink(missing_ok=True)
        remove_leftovers(folder / split)
    remove_leftovers(folder)


def _finish_split(folder: Path, source: Source) -> dict[str, FileRecord]:
    """Write the index, names and groups for a split whose samples are all packed; return the records of its files."""
    layout, index, names = Layout.of(source), folder / "index.npy", folder / "names.json"
    if (folder / PARTIAL).is_file():
        with replacing(index) as temporary, temporary.open("wb") as file:
            np.save(file, _whole_rows(folder / PARTIAL, layout))
    write_json(names, [source.name_of(number) for number in range(len(source))])
    checked = [index, names]
    if source.groups:
        write_json(folder / GROUPS, source.groups)
        checked.append(folder / GROUPS)
    pixels = [pixels_file(folder, name) for name in layout.images]
    files = {file.name: FileRecord(file.stat().st_size) for file in pixels}
    return files | {file.name: FileRecord(file.stat().st_size, checksum_of_file(file)) for file in checked}


def check_same(folder: Path, splits: Mapping[str, SplitRecord]) -> None:
    """Raise UserError if a finished folder was packed from different data."""
    differs = difference(read_manifest(folder).splits, splits)
    if differs:
        raise _another(folder, differs)


def check_whole(source: Source, folder: Path, split: str, num_workers: int, done: Progress) -> None:
    """Check every pixel of a packed split; if necessary, compare it with all samples of the source."""
    packed = PackedSplit(folder, split)
    samples = _samples(source, 0, num_workers) if must_be_read(source) else None
    for number in range(len(packed.index)):
        packed.check(number)
        if samples is not None:
            _compare(next(samples), packed.index[number], packed.layout, packed.names[number], folder)
        done(number + 1)


def _another(folder: Path, differs: str) -> UserError:
    return UserError(
        f"{folder}: was packed from a different source, or the source has changed since then ({differs}); "
        f"delete {folder} and pack again, or choose a different folder"
    )


def _samples(source: Source, start: int, num_workers: int) -> Iterator[Sample]:
    """Yield all samples from `start` on."""
    with closing(read_in_order(source, num_workers, BYTES_PER_READ, start)) as pieces:
        for piece in pieces:
            fields = {name: field.numpy() for name, field in piece.items()}
            for row in range(len(fields["index"])):
                yield {name: field[row] for name, field in fields.items()}


def _row(sample: Sample, layout: Layout, offsets: Sequence[int]) -> NDArray[np.int64]:
    """Return a sample's index row, given the offsets of its images."""
    row: list[int] = []
    for name, offset in zip(layout.images, offsets, strict=True):
        height, width, _ = sample[name].shape
        row += [offset, height, width, crc32(np.ascontiguousarray(sample[name]).data)]
    return np.array(row + [int(sample[name]) for name in layout.numbers], dtype=np.int64)


def _compare(sample: Sample, kept: NDArray[np.int64], layout: Layout, name: str, folder: Path) -> None:
    """Raise UserError if a sample differs from what was packed."""
    offsets = kept[: len(layout.images) * len(PLACE) : len(PLACE)].tolist()
    if not np.array_equal(_row(sample, layout, offsets), kept):
        raise _another(folder, f"{name} differs")


def _whole_rows(file: Path, layout: Layout) -> NDArray[np.int64]:
    width = len(layout.columns)
    rows = np.frombuffer(file.read_bytes()[: file.stat().st_size // (8 * width) * 8 * width], dtype=np.int64)
    return rows.reshape(-1, width)


def _ends(index: NDArray[np.int64], field: int, bytes_per_px: int) -> NDArray[np.int64]:
    """Return the end offset of each image in a field."""
    place = index[:, field * len(PLACE) : (field + 1) * len(PLACE)]
    ends: NDArray[np.int64] = place[:, 0] + place[:, 1] * place[:, 2] * bytes_per_px
    return ends
