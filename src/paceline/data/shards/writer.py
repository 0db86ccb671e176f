"""Writes the samples of a source into shards, each with an index; an interrupted command resumes at the next shard."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.contracts.data_spec import INPUT
from paceline.core.errors import UserError
from paceline.core.files import replacing, write_file
from paceline.core.storage.files import Storage
from paceline.core.storage.reader import Reader
from paceline.data.file_lists import is_image
from paceline.data.shards.index import SUFFIX, ShardIndex, scan
from paceline.data.shards.samples import split_name
from paceline.data.source import LABEL, Source
from paceline.images.decode import to_pillow
from paceline.images.deep import write_planes

INPUT_MEMBER = "input"  # name of the field "image" in samples with several images
Progress = Callable[[int], None]  # called with the number of finished samples


def write_shards(
    source: Source, folder: Path, split: str, max_bytes: int, decoded: bool, done: Progress
) -> Iterator[str]:
    """Write a split; yield the name of every shard when it is complete.

    Files are copied without changes, unless `decoded` is true or the samples are not files. Then the images that
    `source.read` returns are stored as PNG or, with more bits or channels, as TIFF.
    """
    number, first = 0, 0
    while first < len(source):
        name = f"{split}-{number:06d}.tar"
        kept = _next_sample(folder, name)
        first = kept or _write_shard(source, folder / name, first, max_bytes, decoded, done)
        if kept:
            done(kept)
        number += 1
        yield name


def check_shard(folder: Path, name: str) -> int:
    """Compare a shard with its index, and return the number of the next sample; raise UserError if they differ."""
    if not (folder / name).is_file():
        raise UserError(f"{folder / name}: is missing; restore it, or delete {folder} and pack again")
    if _kept(folder / (name + SUFFIX)) != _scanned(folder, name):
        raise UserError(f"{folder / name}: does not match its index; delete {folder} and pack again")
    return _next_sample(folder, name)


def _write_shard(source: Source, path: Path, first: int, max_bytes: int, decoded: bool, done: Progress) -> int:
    """Write one shard and its index; return the number of the sample after its last one."""
    with replacing(path) as temporary, tarfile.open(temporary, "w", format=tarfile.USTAR_FORMAT) as archive:
        number = first
        while number < len(source) and (number == first or archive.offset < max_bytes):
            for name, content in _members(source, number, decoded).items():
                header = tarfile.TarInfo(name)
                header.size = len(content)
                archive.addfile(header, io.BytesIO(content))
            number += 1
            done(number)
    index = _scanned(path.parent, path.name)
    wrong = next((member for member in index.members if member.problem), None)
    if wrong:
        raise UserError(
            f"{source.name_of(int(split_name(wrong.name)[0]))}: {wrong.problem}; remove or replace the file"
        )
    write_file(path.with_name(path.name + SUFFIX), index.encode())
    return number


def _members(source: Source, number: int, decoded: bool) -> dict[str, bytes]:
    """Return the content of a sample's members, by name."""
    key = f"{number:08d}"
    files = None if decoded else source.originals(number)
    if files is not None and all(is_image(path) for path in files.files.values()):
        numbers = files.numbers
        images = {field: (path.suffix.lower(), _read(path)) for field, path in files.files.items()}
    else:
        sample = source.read(number)
        numbers = {field: value for field, value in sample.items() if value.ndim == 0}
        images = {field: _encoded(sample[field]) for field in sample if field not in numbers}
    unknown = [field for field in numbers if field != LABEL]
    if unknown:
        raise UserError(
            f"{source.name_of(number)}: shards cannot store the field {unknown[0]!r}; pack without --to-shards"
        )
    members = {}
    for field, (suffix, content) in images.items():
        named = "" if len(images) == 1 else f".{INPUT_MEMBER if field == INPUT else field}"
        members[f"{key}{named}{suffix}"] = content
    return members | {f"{key}.cls": str(int(value)).encode() for value in numbers.values()}


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); restore the file, then pack again") from None


def _encoded(pixels: NDArray[Any]) -> tuple[str, bytes]:
    """Return an image as a PNG file or, if PNG cannot store it, as a TIFF file; also return the suffix."""
    buffer = io.BytesIO()
    if pixels.dtype == np.uint8 and pixels.shape[-1] in (1, 3):
        to_pillow(pixels).save(buffer, "PNG")
        return ".png", buffer.getvalue()
    write_planes(buffer, pixels)
    return ".tif", buffer.getvalue()


def _scanned(folder: Path, name: str) -> ShardIndex:
    storage = Storage(str(folder), "pack")
    (file,) = storage.describe_files([name])
    return scan(Reader(storage, [file], None, 0.0), file)


def _kept(file: Path) -> ShardIndex | None:
    try:
        return ShardIndex.parse(file.read_bytes())
    except (OSError, ValueError):
        return None


def _next_sample(folder: Path, name: str) -> int:
    """Return the number of the sample after a finished shard; 0 if the shard is not finished."""
    index, path = _kept(folder / (name + SUFFIX)), folder / name
    if index is None or not index.members or not path.is_file() or path.stat().st_size != index.size:
        return 0
    return int(split_name(index.members[-1].name)[0]) + 1
