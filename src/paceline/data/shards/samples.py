"""Groups the members of shards into samples, and decides which of a sample's images are used and how."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import NamedTuple
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from paceline.config.settings import RunSettings
from paceline.contracts.data_spec import INPUT, LEFT_OUT, output_panels
from paceline.core.errors import UserError
from paceline.core.storage.files import Span, StoredFile
from paceline.core.text import printable
from paceline.data.file_lists import HIDDEN, SUFFIXES, Problem, without_details
from paceline.data.shards.index import HEADER_BYTES, LABEL_SUFFIX, PICKLES, UNKNOWN, Member, ShardIndex, parse_label
from paceline.data.source import RESERVED, TARGET, Sample
from paceline.images.readers import Decoded, ImageReader

LABEL = "label"
FIELD_NAMES = {"input": INPUT}  # names of fields in shards that differ from the names in samples


class Placed(NamedTuple):
    """One member of every sample: where its bytes are, their checksum, and the size of the image."""

    shard: NDArray[np.int32]
    offset: NDArray[np.int64]
    size: NDArray[np.int64]
    crc32: NDArray[np.uint32]
    header_crc32: NDArray[np.int64]  # of the tar header before it
    pixels: NDArray[np.int64]  # [n, 2]: height and width

    def rows(self, rows: NDArray[np.int64]) -> Placed:
        """Return the members of some samples."""
        return Placed._make(column[rows] for column in self)


@dataclass(frozen=True)
class SampleTable:
    """All usable samples of several shards, in order, without their content."""

    places: tuple[str, ...]  # path or URL of each shard
    images: Mapping[str, Placed]  # by field
    labels: NDArray[np.int64] | None
    label_members: Placed | None
    names: list[str]
    problems: tuple[Problem, ...]  # samples and shards that cannot be used
    ignored: Mapping[str, int]  # number of members that are not used, by suffix

    def __len__(self) -> int:
        return len(self.images[INPUT].shard) if self.images else 0

    def members(self, field: str) -> Placed:
        """Return where an image or the label of every sample is."""
        return self.label_members if field == LABEL and self.label_members else self.images[field]

    def span(self, field: str, index: int) -> Span:
        """Return where a member of a sample is, with its tar header."""
        placed = self.members(field)
        start = int(placed.offset[index])
        return Span(self.places[placed.shard[index]], start - HEADER_BYTES, start + int(placed.size[index]))

    def matches(self, field: str, index: int, content: bytes) -> bool:
        """Return whether a member, which was read with its tar header, has not changed since it was indexed."""
        placed, header, content = self.members(field), content[:HEADER_BYTES], content[HEADER_BYTES:]
        if crc32(content) != placed.crc32[index] or placed.header_crc32[index] not in (UNKNOWN, crc32(header)):
            return False
        try:
            return field != LABEL or self.labels is None or parse_label(content) == self.labels[index]
        except ValueError:
            return False

    def rows(self, rows: NDArray[np.int64]) -> SampleTable:
        """Return a table with some of the samples."""
        images = {field: placed.rows(rows) for field, placed in self.images.items()}
        labels = None if self.labels is None else self.labels[rows]
        names = [self.names[row] for row in rows.tolist()]
        label_members = self.label_members.rows(rows) if self.label_members else None
        return SampleTable(self.places, images, labels, label_members, names, self.problems, self.ignored)


class _Found(NamedTuple):
    name: str
    shard: int
    fields: dict[str, Member]
    problem: Problem | None


def make_table(shards: Sequence[tuple[StoredFile, ShardIndex]]) -> SampleTable:
    """Return the samples in all shards; leave out those without the fields that most samples have."""
    problems = [Problem.of(printable(file.name), index.problem) for file, index in shards if index.problem]
    ignored: Counter[str] = Counter()
    found = [sample for row, (file, index) in enumerate(shards) for sample in _samples(row, file.name, index, ignored)]
    fields = _common_fields(found)
    usable = []
    for sample in found:
        missing = [field for field in sorted(fields) if field not in sample.fields]
        problem = sample.problem or (_describe_missing(missing[0], sample) if missing else None)
        if problem:
            problems.append(problem)
        else:
            usable.append(sample)
    return SampleTable(
        places=tuple(file.place for file, _ in shards),
        images={field: _placed(field, usable) for field in _ordered(fields - {LABEL})} if usable else {},
        labels=np.array([sample.fields[LABEL].label for sample in usable]) if LABEL in fields else None,
        label_members=_placed(LABEL, usable) if LABEL in fields else None,
        names=[sample.name for sample in usable],
        problems=tuple(problems),
        ignored=ignored,
    )


def _describe_missing(field: str, sample: _Found) -> Problem:
    others = f", only for {', '.join(sorted(sample.fields))}" if field == INPUT and sample.fields else ""
    kind = f"no member for {field!r}"
    return Problem.of(f"{printable(sample.name):.200}", f"{kind}{others}", kind)


def split_name(name: str) -> tuple[str, str]:
    """Return a member's sample key, which includes its folders, and the rest of its name after the first dot."""
    folder, slash, base = name.rpartition("/")
    stem, _, rest = base.partition(".")
    return f"{folder}{slash}{stem}", rest.lower()


def field_of(rest: str) -> str:
    """Return the field for the part of a member's name after the first dot; "" if the member is not used."""
    if f".{rest}" == LABEL_SUFFIX:
        return LABEL
    name, _, suffix = rest.rpartition(".")
    if f".{suffix}" not in SUFFIXES or (name and not name.isidentifier()):
        return ""
    return FIELD_NAMES.get(name, name or INPUT)


def _samples(shard: int, shard_name: str, index: ShardIndex, ignored: Counter[str]) -> list[_Found]:
    """Return the samples of a shard, in the order of their first members."""
    found: dict[str, dict[str, Member]] = {}
    problems: dict[str, Problem] = {}
    for member in index.members:
        key, rest = split_name(member.name)
        if PurePosixPath(member.name).name.startswith(HIDDEN) or not rest:
            ignored["no suffix"] += not rest
            continue
        field, suffix = field_of(rest), PurePosixPath(member.name).suffix.lower()
        if not field and suffix not in PICKLES:
            ignored[f"{suffix} after several dots" if suffix in SUFFIXES else suffix] += 1
            continue
        fields = found.setdefault(key, {})
        name, problem = f"{printable(f'{shard_name}/{key}'):.200}", member.problem or _wrong_use(field, rest, member)
        if problem:
            reason = f"{printable(PurePosixPath(member.name).name):.200}: {problem}"
            problems.setdefault(key, Problem.of(name, reason, without_details(problem)))
        if field in fields:
            kind = f"several members for {field!r}"
            problems.setdefault(key, Problem.of(name, f"{kind}, such as {printable(member.name):.200}", kind))
        fields[field] = member
    return [_Found(f"{shard_name}/{key}", shard, fields, problems.get(key)) for key, fields in found.items()]


def _wrong_use(field: str, rest: str, member: Member) -> str:
    """Return why an intact member cannot be used as this field; "" if it can."""
    if field == LABEL and f".{rest}" == LABEL_SUFFIX:
        return "" if member.label >= 0 else "no class number in the index"
    if field in RESERVED:
        return f"{field!r} is the name of another field; rename the image"
    return "" if member.height and member.width else "no image size in the index"


def _common_fields(found: Sequence[_Found]) -> set[str]:
    """Return the fields that most samples have."""
    counted = Counter(frozenset(sample.fields) for sample in found if not sample.problem)
    most = max(((count, len(fields), sorted(fields)) for fields, count in counted.items()), default=(0, 0, []))
    return {INPUT, *most[-1]} if found else set()


def _ordered(fields: Iterable[str]) -> list[str]:
    return sorted(fields, key=lambda field: (field != INPUT, field))


def _placed(field: str, samples: Sequence[_Found]) -> Placed:
    members = [sample.fields[field] for sample in samples]
    return Placed(
        np.array([sample.shard for sample in samples], dtype=np.int32),
        np.array([member.offset for member in members], dtype=np.int64),
        np.array([member.size for member in members], dtype=np.int64),
        np.array([member.crc32 for member in members], dtype=np.uint32),
        np.array([member.header_crc32 for member in members], dtype=np.int64),
        np.array([(member.height, member.width) for member in members], dtype=np.int64),
    )


LOW = "low"  # low-resolution version of the image


@dataclass(frozen=True)
class SampleLayout:
    """How the images of a sample are used."""

    fields: tuple[str, ...]  # the images that are read
    row: tuple[str, ...]  # names of the panels from left to right, if "image" is a row of panels
    panels: tuple[str, ...]  # fields to predict from the image; empty except for panels
    side: int  # height and width of the square images; 0 keeps the size of each image
    scale: int  # ratio of "image" to "low"; 0 if there is no field "low"

    @classmethod
    def of(cls, table: SampleTable, settings: RunSettings, names: tuple[str, ...]) -> SampleLayout:
        """Choose the layout for the samples in a table; `names` are the panels in the settings."""
        stored = list(table.images)
        fields, row = stored, tuple(names) if stored == [INPUT] else ()
        if names and not row:
            fields = [name for name in names if name != LEFT_OUT]
            unknown = [name for name in fields if name not in stored]
            if unknown:
                raise UserError(
                    f"panels={','.join(names)}: no panel {unknown[0]!r}; the shards have {', '.join(stored)}"
                )
        others = set(fields) - {INPUT, TARGET, LOW}
        squares = not row and fields == [INPUT] and (table.labels is not None or not settings.crop)
        if LOW in fields and settings.size:
            raise UserError(f"size={settings.size}: not supported with low-resolution images; use --set size=0")
        return cls(
            tuple(fields),
            row,
            output_panels(row or (fields if names or others else ())),
            settings.size or (int(table.images[INPUT].pixels[0].min()) if squares else 0),
            _find_scale(table) if LOW in fields else 0,
        )

    def image_sizes(self, table: SampleTable) -> NDArray[np.int64]:
        """Return the height and width of each sample's "image", as an [n, 2] array."""
        if self.scale:
            return table.images[LOW].pixels * self.scale
        return table.images[INPUT].pixels // (1, max(1, len(self.row)))

    def problems(self, table: SampleTable) -> dict[int, str]:
        """Return, by row, why a sample cannot be used: the sizes of its images do not fit together."""
        height, width = table.images[INPUT].pixels.T
        found: dict[int, str] = {}
        if self.row:
            count = len(self.row)
            squares = np.where(width % height == 0, width // height, 0)
            fits = (width % count == 0) & ((count == 2) | (squares == 0) | (squares == count))
            for index in np.flatnonzero(~fits):
                found[int(index)] = f"{width[index]}×{height[index]} pixels is not a row of {count} equal panels"
        for field in self.fields:
            other_height, other_width = table.images[field].pixels.T
            fits = (other_height == height) & (other_width == width)
            if field == LOW:
                fits = _ratios(table) == self.scale
            for index in np.flatnonzero(~fits):
                size = f"{other_width[index]}×{other_height[index]}"
                found[int(index)] = f"{INPUT} is {width[index]}×{height[index]} pixels but {field} is {size}"
        return found

    def arrange(self, images: Mapping[str, Decoded], label: NDArray[np.int64] | None, reader: ImageReader) -> Sample:
        """Return a sample, given its images, as decoded by `reader`, and its label, if any."""
        if self.row:
            image = images[INPUT]
            width = image.width // len(self.row)
            parts = (image.crop((left, 0, left + width, image.height)) for left in range(0, image.width, width))
            images = {name: part for name, part in zip(self.row, parts, strict=True) if name != LEFT_OUT}
        sample = {name: reader.arrange(image, self.side) for name, image in images.items()}
        if self.scale:
            height, width = (length * self.scale for length in sample[LOW].shape[:2])
            sample[INPUT] = sample[INPUT][:height, :width]
        return sample if label is None else {**sample, LABEL: label}


def _ratios(table: SampleTable) -> NDArray[np.int64]:
    """Return the integer ratio of "image" to "low" for each sample; 0 if no ratio fits."""
    size, low = table.images[INPUT].pixels, table.images[LOW].pixels
    ratio = size[:, 0] // low[:, 0]
    fits = (ratio > 1) & (ratio == size[:, 1] // low[:, 1]) & ((size % low).max(axis=1) < ratio)
    return np.where(fits, ratio, 0)


def _find_scale(table: SampleTable) -> int:
    found = _ratios(table)
    values, counts = np.unique(found[found > 1], return_counts=True)
    if not len(values):
        raise UserError(
            f"{table.names[0]}: the image must be larger than the field {LOW!r} by a whole-number factor, such as 4"
        )
    return int(values[counts.argmax()])
