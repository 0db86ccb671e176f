"""What `paceline pack` writes: packed folders, in which images are stored decoded, and shards; both can be resumed."""

from __future__ import annotations

import dataclasses
import errno
import io
import json
import os
import tarfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.contracts.data_spec import INPUT, parse_spec, written_values
from paceline.contracts.recipe import DataSpec
from paceline.core.errors import UserError
from paceline.core.files import (
    MAX_BYTES,
    WRITING,
    checksum_of_content,
    checksum_of_file,
    parse_json,
    read_bounded,
    remove_leftovers,
    replacing,
    sync_open,
    why,
    write_file,
    write_json,
)
from paceline.core.storage.files import Storage
from paceline.core.storage.reader import Reader
from paceline.data.file_lists import is_image
from paceline.data.fingerprint import IDENTITY_SAMPLES, fingerprint, sha256_of_stats
from paceline.data.shard_index import SUFFIX, ShardIndex, scan
from paceline.data.shards import split_name
from paceline.data.source import LABEL, LOW, TARGET, Sample, Source, is_in_memory
from paceline.data.stream import cut
from paceline.data.worker_pool import read_in_order
from paceline.images.decode import to_pillow
from paceline.images.deep import write_planes
from paceline.images.rectangles import Box

FORMAT, VERSION = "paceline pack", 3
MANIFEST, UNFINISHED = "pack.json", "packing.json"
PLACE = ("offset", "height", "width", "checksum")  # index columns for each image field


@dataclass(frozen=True)
class FileRecord:
    """Size and checksum of a file in a packed split, used to detect damage."""

    bytes: int
    sha256: str = ""  # empty for pixel files, which have a checksum per image in the index


@dataclass(frozen=True)
class SplitRecord:
    """The properties that identify a split and, after packing, its files."""

    count: int
    spec: DataSpec
    mixed: bool  # whether image sizes may differ
    images: Mapping[str, int]  # number of channels by field
    numbers: tuple[str, ...]
    names_sha256: str
    numbers_sha256: str
    files_sha256: str  # hash of the names, sizes and modification times of the source's files, if any
    fingerprint: str
    groups_sha256: str = ""  # hash of the samples' group names; empty if there are no groups
    files: Mapping[str, FileRecord] = field(default_factory=dict)

    @property
    def columns(self) -> list[str]:
        """The names of the index columns."""
        return [f"{name}.{what}" for name in self.images for what in PLACE] + list(self.numbers)

    @property
    def bytes_per_px(self) -> dict[str, int]:
        """The size of a pixel in each image field."""
        return {name: channels * np.dtype(self.spec.dtype).itemsize for name, channels in self.images.items()}

    @property
    def aligned(self) -> set[str]:
        """The image fields that have the channels of "image" and its size, which is divided by the scale for "low"."""
        return {INPUT, *self.spec.panels} | self.images.keys() & {LOW, TARGET}

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> SplitRecord:
        """Parse a record; raise KeyError, TypeError, ValueError or AttributeError if it is malformed."""
        files = {name: FileRecord(**listed) for name, listed in content["files"].items()}
        read = {"spec": parse_spec(content["spec"]), "numbers": tuple(content["numbers"]), "files": files}
        record = cls(**{**content, **read})
        spec, fields = record.spec, [*record.images, *record.numbers]
        right = {
            "count": type(record.count) is int and 0 < record.count < 2**40,
            "mixed": type(record.mixed) is bool,
            "images": all(type(count) is int and count > 0 for count in record.images.values()),
            "fields": len(set(fields)) == len(fields) and all(map(is_file_name, fields)),
            "channels": all(record.images.get(name) == spec.channels for name in record.aligned),
            "size": min(spec.height, spec.width) > 0,
            "scale": spec.scale > 1 if LOW in record.images else spec.scale == 0,
            "class names": len(spec.class_names) in (0, spec.num_classes),
            "label": not spec.num_classes or "label" in record.numbers,
            "files": all(type(file.bytes) is int and isinstance(file.sha256, str) for file in files.values()),
        }
        wrong = [what for what, is_right in right.items() if not is_right]
        if wrong:
            raise ValueError(f"invalid {wrong[0]}")
        return record


@dataclass(frozen=True)
class Manifest:
    """The description of a packed folder, finished or in progress."""

    made_from: Mapping[str, str]  # settings of the `paceline pack` command
    splits: Mapping[str, SplitRecord]

    def write(self, file: Path) -> None:
        """Write the manifest with its checksum."""
        splits = {
            name: dataclasses.asdict(one) | {"spec": written_values(one.spec)} for name, one in self.splits.items()
        }
        content = {"format": FORMAT, "version": VERSION, "made_from": dict(self.made_from), "splits": splits}
        write_json(file, content | {"sha256": checksum_of_content(content)})


def read_manifest(root: Path) -> Manifest:
    """Return the manifest of a packed folder; raise UserError if the folder is not a finished pack."""
    file = root / MANIFEST
    if not file.is_file():
        if (root / UNFINISHED).is_file():
            raise UserError(f"{root}: packing was not finished; run the same `paceline pack` command again to resume")
        raise UserError(f"{root}: not a packed folder (it has no {MANIFEST}); create one with paceline pack SRC {root}")
    return load_manifest(file, root)


def load_manifest(file: Path, root: Path) -> Manifest:
    """Read and check the manifest of a packed folder, finished or in progress."""
    content = load_json(file, root)
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise UserError(f"{file}: not written by `paceline pack`; choose a different folder")
    if content.get("version") != VERSION:
        raise damaged(file, root, f"format version {content.get('version')}, expected {VERSION}")
    if content.pop("sha256", None) != checksum_of_content(content):
        raise damaged(file, root, "damaged (checksum mismatch)")
    try:
        splits = {split: SplitRecord.from_json(record) for split, record in content["splits"].items()}
        if not splits or not all(map(is_file_name, splits)):
            raise ValueError("invalid splits")
        return Manifest(dict(content["made_from"]), splits)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise damaged(file, root, f"damaged (not a valid manifest: {why(error)})") from None


def load_json(file: Path, root: Path, max_bytes: int = MAX_BYTES) -> Any:
    """Return the content of a JSON file in a packed folder."""
    try:
        return parse_json(read_bounded(file, max_bytes))
    except (OSError, ValueError) as error:
        raise damaged(file, root, f"damaged ({why(error)})") from None


def is_file_name(name: object) -> bool:
    """Return whether a name from a file can be the name of a file or folder, so that it does not lead elsewhere."""
    return isinstance(name, str) and name not in ("", ".", "..") and not set(name) & {"/", "\0"} and len(name) < 100


def damaged(file: Path, root: Path, what: str) -> UserError:
    """Return the error for a file in a packed folder that cannot be used."""
    return UserError(f"{file}: {what}; delete {root} and pack again")


INDEX, NAMES, GROUPS = "index.npy", "names.json", "groups.json"
PIXELS = ".pixels"


class PackedSamples(Source):
    """The samples in a split of a packed folder. Opening it runs only cheap checks; the pixels are memory-mapped."""

    decodes = False

    def __init__(self, root: Path, split: str) -> None:
        splits = read_manifest(root).splits
        if split not in splits:
            raise UserError(f"{root}: has no split {split!r}; available: {', '.join(splits)}")
        self.root, self.record, folder = root, splits[split], root / split
        self.spec = self.record.spec
        self.column = {name: number for number, name in enumerate(self.record.columns)}
        self.files = {name: pixels_file(folder, name) for name in self.record.images}
        expected = {*(file.name for file in self.files.values()), INDEX, NAMES}
        if self.record.files.keys() - {GROUPS} != expected:
            raise damaged(root / MANIFEST, root, f"damaged (wrong files for the split {split!r})")
        for name, listed in self.record.files.items():
            _check_file(folder / name, listed, root)
        self.index = _read_index(folder / INDEX, self.record, root)
        self.names = _read_strings(folder / NAMES, self.record, root)
        self.groups = tuple(_read_strings(folder / GROUPS, self.record, root)) if GROUPS in self.record.files else ()
        self.pixels = {
            name: np.memmap(file, dtype=np.uint8, mode="r").view(np.ndarray) for name, file in self.files.items()
        }
        # Stored in shared memory, so that a sample checked by one worker is not checked again by another.
        checked = torch.zeros(len(self.index), dtype=torch.bool)
        self._checked = checked.share_memory_().numpy()  # type: ignore[no-untyped-call, unused-ignore]
        self.rows = np.arange(len(self.index))  # index rows of the samples in use

    def __len__(self) -> int:
        return len(self.rows)

    def read(self, index: int) -> Sample:
        return {name: np.array(field) for name, field in self._fields(index).items()}

    def read_window(self, index: int, window: Box) -> Sample:
        return cut(self._fields(index), window, self.spec.scale)

    def numbers_of(self, indices: NDArray[np.int64]) -> Sample | None:
        rows = self.index[self.rows[indices]]
        return {name: rows[:, self.column[name]] for name in self.record.numbers}

    def checksums_of(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        return self.index[self.rows[indices]][:, [self.column[f"{name}.checksum"] for name in self.record.images]]

    def name_of(self, index: int) -> str:
        return self.names[int(self.rows[index])]

    def check(self, row: int) -> None:
        """Raise UserError if a sample's pixels differ from what was packed; each sample is checked only once."""
        if self._checked[row]:
            return
        for name, file in self.files.items():
            if crc32(self._image(name, row).data) != self.index[row, self.column[f"{name}.checksum"]]:
                raise damaged(file, self.root, f"{self.names[row]} is damaged (checksum mismatch)")
        self._checked[row] = True

    def _image(self, name: str, row: int) -> NDArray[Any]:
        first = self.column[f"{name}.offset"]
        offset, height, width = self.index[row, first : first + 3].tolist()
        stored = self.pixels[name][offset : offset + height * width * self.record.bytes_per_px[name]]
        return stored.view(self.record.spec.dtype).reshape(height, width, -1)

    def _fields(self, index: int) -> Sample:
        """Return the fields of a sample, whose images share memory with the file."""
        row = int(self.rows[index])
        self.check(row)
        images = {name: self._image(name, row) for name in self.files}
        return images | {name: self.index[row, self.column[name]] for name in self.record.numbers}


def pixels_file(folder: Path, name: str) -> Path:
    """Return the pixel file for a field in a split's folder."""
    return folder / f"{name}{PIXELS}"


def _read_index(file: Path, record: SplitRecord, root: Path) -> NDArray[np.int64]:
    """Return the rows of an index; raise UserError unless they list each image in order and fit the manifest."""
    try:
        # A mapped file cannot be larger than it claims, and np.load would also read pickled objects and zip files.
        stored = np.lib.format.open_memmap(file, mode="r")
    except Exception as error:  # a damaged header can raise any exception
        raise damaged(file, root, f"damaged ({why(error)})") from None
    spec, shape = record.spec, (record.count, len(record.columns))
    if stored.shape != shape or stored.dtype != np.int64:
        actual = f"{stored.dtype} of shape {list(stored.shape)}"
        raise damaged(file, root, f"damaged ({actual} instead of int64 of shape {list(shape)})")
    index: NDArray[np.int64] = np.array(stored, order="C")
    sizes = {}
    for number, (name, bytes_per_px) in enumerate(record.bytes_per_px.items()):
        offset, height, width, checksum = index[:, number * len(PLACE) : (number + 1) * len(PLACE)].T
        total = record.files[f"{name}{PIXELS}"].bytes
        sizes[name] = np.stack([height, width])
        are_valid = (offset >= 0) & (offset < total) & (height > 0) & (width > 0) & (width <= total)
        are_valid &= height <= total // bytes_per_px // np.maximum(width, 1)  # no product can overflow
        ends = offset + height * width * bytes_per_px
        are_valid &= checksum >> 32 == 0
        if not are_valid.all() or offset[0] or (ends[:-1] != offset[1:]).any() or ends[-1] != total:
            raise damaged(file, root, f"damaged (images of {name!r} that are not in {name}{PIXELS}, or not in order)")
    whole = sizes[INPUT]
    for name, size in sizes.items():
        expected = whole if record.mixed or name in record.aligned - {LOW} else size[:, :1]
        if (size * spec.scale != whole if name == LOW else size != expected).any():
            raise damaged(file, root, f"damaged (images of {name!r} whose sizes do not fit together)")
    if not record.mixed and whole[:, 0].tolist() != [spec.height, spec.width]:
        raise damaged(file, root, "damaged (images whose size differs from the data spec)")
    labels = index[:, record.columns.index("label")] if spec.num_classes else index[:0, 0]
    if (labels < 0).any() or (labels >= spec.num_classes).any():
        raise damaged(file, root, f"damaged (labels that are not from 0 to {spec.num_classes - 1})")
    return index


def _read_strings(file: Path, record: SplitRecord, root: Path) -> list[str]:
    """Return the texts in a JSON file, one for each sample."""
    read = load_json(file, root, record.files[file.name].bytes)
    if not isinstance(read, list) or len(read) != record.count or not all(isinstance(text, str) for text in read):
        raise damaged(file, root, f"damaged (not a list of {record.count:,} names)")
    return read


def _check_file(file: Path, listed: FileRecord, root: Path) -> None:
    found = file.stat().st_size if file.is_file() else -1
    if found < 0:
        raise damaged(file, root, "missing")
    if found != listed.bytes:
        raise damaged(file, root, f"has {found:,} bytes instead of {listed.bytes:,}")
    if (listed.sha256 or not file.name.endswith(PIXELS)) and checksum_of_file(file) != listed.sha256:
        raise damaged(file, root, "damaged (checksum mismatch)")


def describe(source: Source) -> SplitRecord:
    """Return the properties that identify a split, before it is packed."""
    sample = source.read(0)
    images = {name: int(field.shape[-1]) for name, field in sample.items() if field.ndim == 3}
    numbers = tuple(name for name in sample if name not in images)
    names = (f"{json.dumps(source.name_of(index))}\n" for index in range(len(source)))
    return SplitRecord(
        count=len(source),
        spec=source.spec,
        mixed=source.sizes is not None,
        images=images,
        numbers=numbers,
        names_sha256=sha256("".join(names).encode()).hexdigest(),
        numbers_sha256=_sha256_of_numbers(source, numbers),
        files_sha256=_sha256_of_files(source),
        fingerprint=fingerprint(source, IDENTITY_SAMPLES),
        groups_sha256=sha256(json.dumps(source.groups).encode()).hexdigest() if source.groups else "",
    )


PROPERTIES = {  # of a split, checked in this order, as messages call them
    "images": "image fields",
    "numbers": "label fields",
    "mixed": "sizes of the images",
    "spec": "data specs (size, channels, classes)",
    "groups_sha256": "groups (group_by)",
    "names_sha256": "names of the samples",
    "numbers_sha256": "labels",
    "files_sha256": "names, sizes or modification times of the files",
    "fingerprint": "images",
}


def difference(kept: Mapping[str, SplitRecord], found: Mapping[str, SplitRecord]) -> str:
    """Describe how a source's splits differ from those that were packed; "" if they do not differ."""
    if list(kept) != list(found):
        return f"the splits are {', '.join(found)} instead of {', '.join(kept)}"
    for split, before in kept.items():
        now = found[split]
        if before.count != now.count:
            return f"{split} has {now.count:,} samples instead of {before.count:,}"
        for name, text in PROPERTIES.items():
            if getattr(before, name) != getattr(now, name):
                return f"{split}: the {text} differ"
    return ""


def must_be_read(source: Source) -> bool:
    """Return whether changes in the source can only be detected by reading all of it."""
    return not is_in_memory(source) and not _lists_its_files(source)


def _sha256_of_files(source: Source) -> str:
    """Return a hash of the name, size and modification time of every sample's files; "" if there are no files."""
    try:
        return sha256_of_stats(source) if _lists_its_files(source) else ""
    except OSError as error:
        raise UserError(
            f"{error.filename}: {error.strerror}; the file was removed or changed during packing; pack again"
        ) from error


def _lists_its_files(source: Source) -> bool:
    """Return whether `files_of` is reliable; it is not if a user's class overrides only `read`."""
    lister, reader = (next(one for one in type(source).__mro__ if name in vars(one)) for name in ("files_of", "read"))
    if not issubclass(lister, reader) and not reader.__module__.startswith("paceline."):
        return False
    first = source.files_of(0)
    return first is not None and {name for name, field in source.read(0).items() if field.ndim == 0} <= {*first.numbers}


def _sha256_of_numbers(source: Source, names: Sequence[str]) -> str:
    if must_be_read(source) or not names:
        return ""
    numbers = source.numbers_of(np.arange(len(source)))
    assert numbers is not None
    return sha256(np.stack([numbers[name] for name in names], axis=1).astype(np.int64).tobytes()).hexdigest()


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
            differs = " ".join(["settings:", *(f"{name}={value}" for name, value in kept.made_from.items())])
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


def fill(source: Source, folder: Path, record: SplitRecord, num_workers: int, done: Progress) -> None:
    """Pack a split, described by its record, into its folder.

    Resume where an earlier attempt stopped; if the samples may have changed since then, start over.
    """
    folder.mkdir(exist_ok=True)
    partial = folder / PARTIAL
    with ExitStack() as stack:
        rows = stack.enter_context(open(partial, "ab", buffering=0))
        files = [stack.enter_context(open(pixels_file(folder, name), "ab")) for name in record.images]
        index = _whole_rows(partial, record)[: 0 if must_be_read(source) else None]
        ends = [_ends(index, number, bytes_per_px) for number, bytes_per_px in enumerate(record.bytes_per_px.values())]
        for end, file in zip(ends, files, strict=True):
            index = index[: np.searchsorted(end, os.fstat(file.fileno()).st_size, side="right")]
        os.truncate(partial, index.nbytes)
        for end, file in zip(ends, files, strict=True):
            os.truncate(file.fileno(), int(end[len(index) - 1]) if len(index) else 0)
            file.seek(0, os.SEEK_END)
        done(len(index))
        for number, sample in enumerate(_samples(source, len(index), num_workers), len(index)):
            row = _row(sample, record, [file.tell() for file in files])
            for name, file in zip(record.images, files, strict=True):
                file.write(np.ascontiguousarray(sample[name]).data)
                file.flush()
            if rows.write(row.tobytes()) != row.nbytes:  # written last: a row marks a complete sample
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            done(number + 1)
        for file in files:
            sync_open(file.fileno())


def finish(folder: Path, sources: Mapping[str, Source]) -> None:
    """Write the indexes and the manifest, which completes the pack, and remove temporary files."""
    manifest = load_manifest(folder / UNFINISHED, folder)
    splits = {}
    for split, source in sources.items():
        here, record = folder / split, manifest.splits[split]
        if _sha256_of_files(source) != record.files_sha256:
            raise _another(folder, f"{split}: files changed during packing")
        splits[split] = dataclasses.replace(record, files=_finish_split(here, record, source))
    Manifest(manifest.made_from, splits).write(folder / MANIFEST)
    (folder / UNFINISHED).unlink()
    for split in sources:
        (folder / split / PARTIAL).unlink(missing_ok=True)
        remove_leftovers(folder / split)
    remove_leftovers(folder)


def _finish_split(folder: Path, record: SplitRecord, source: Source) -> dict[str, FileRecord]:
    """Write the index, names and groups for a split whose samples are all packed; return the records of its files."""
    if (folder / PARTIAL).is_file():
        with replacing(folder / INDEX) as temporary, temporary.open("wb") as file:
            np.save(file, _whole_rows(folder / PARTIAL, record))
    write_json(folder / NAMES, [source.name_of(number) for number in range(len(source))])
    if source.groups:
        write_json(folder / GROUPS, source.groups)
    pixels = [pixels_file(folder, name) for name in record.images]
    files = {file.name: FileRecord(file.stat().st_size) for file in pixels}
    checked = [folder / name for name in (INDEX, NAMES, *([GROUPS] if source.groups else []))]
    return files | {file.name: FileRecord(file.stat().st_size, checksum_of_file(file)) for file in checked}


def check_same(manifest: Path, splits: Mapping[str, SplitRecord]) -> None:
    """Raise UserError if a folder, described by its manifest, was written from different data."""
    differs = difference(load_manifest(manifest, manifest.parent).splits, splits)
    if differs:
        raise _another(manifest.parent, differs)


def check_whole(source: Source, folder: Path, split: str, num_workers: int, done: Progress) -> None:
    """Check every pixel of a packed split; if necessary, compare it with all samples of the source."""
    packed = PackedSamples(folder, split)
    samples = _samples(source, 0, num_workers) if must_be_read(source) else None
    for number, kept in enumerate(packed.index):
        packed.check(number)
        offsets = kept[: len(packed.record.images) * len(PLACE) : len(PLACE)].tolist()
        if samples is not None and not np.array_equal(_row(next(samples), packed.record, offsets), kept):
            raise _another(folder, f"{packed.names[number]} differs")
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


def _row(sample: Sample, record: SplitRecord, offsets: Sequence[int]) -> NDArray[np.int64]:
    """Return a sample's index row, given the offsets of its images."""
    row: list[int] = []
    for name, offset in zip(record.images, offsets, strict=True):
        height, width, _ = sample[name].shape
        row += [offset, height, width, crc32(np.ascontiguousarray(sample[name]).data)]
    return np.array(row + [int(sample[name]) for name in record.numbers], dtype=np.int64)


def _whole_rows(file: Path, record: SplitRecord) -> NDArray[np.int64]:
    """Return the index rows in a file whose last row may be incomplete."""
    width = len(record.columns)
    return np.fromfile(file, dtype=np.int64, count=file.stat().st_size // (8 * width) * width).reshape(-1, width)


def _ends(index: NDArray[np.int64], field: int, bytes_per_px: int) -> NDArray[np.int64]:
    """Return the end offset of each image in a field."""
    place = index[:, field * len(PLACE) : (field + 1) * len(PLACE)]
    ends: NDArray[np.int64] = place[:, 0] + place[:, 1] * place[:, 2] * bytes_per_px
    return ends


INPUT_MEMBER = "input"  # name of the field "image" in samples with several images


def write_shards(
    source: Source, folder: Path, split: str, max_bytes: int, decoded: bool, done: Progress
) -> Iterator[str]:
    """Write a split into tar files, each with an index; yield the name of every shard when it is complete.

    A shard that an interrupted command finished is kept. Files are copied without changes, unless `decoded` is true or
    the samples are not files. Then the images that `source.read` returns are stored as PNG or, with more bits or
    channels, as TIFF.
    """
    number, first = 0, 0
    while first < len(source):
        name = f"{split}-{number:06d}.tar"
        if kept := _next_sample(folder, name):
            done(kept)
        first = kept or _write_shard(source, folder / name, first, max_bytes, decoded, done)
        number += 1
        yield name


def check_shard(folder: Path, name: str) -> int:
    """Compare a shard with its index, and return the number of the next sample; raise UserError if they differ."""
    if not (folder / name).is_file():
        raise UserError(f"{folder / name}: is missing; restore it, or delete {folder} and pack again")
    if _shard_index(folder / (name + SUFFIX)) != _scanned(folder, name):
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
    for name, (suffix, content) in images.items():
        named = "" if len(images) == 1 else f".{INPUT_MEMBER if name == INPUT else name}"
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


def _shard_index(file: Path) -> ShardIndex | None:
    try:
        return ShardIndex.parse(file.read_bytes())
    except (OSError, ValueError):
        return None


def _next_sample(folder: Path, name: str) -> int:
    """Return the number of the sample after a finished shard; 0 if the shard is not finished."""
    index, path = _shard_index(folder / (name + SUFFIX)), folder / name
    if index is None or not index.members or not path.is_file() or path.stat().st_size != index.size:
        return 0
    return int(split_name(index.members[-1].name)[0]) + 1
