"""Groups the members of shards into samples, as WebDataset does.

Members whose names are equal up to the first dot belong to one sample: `000123.jpg`, `000123.cls`. The rest of the name
selects the field: `jpg` and `input.png` are the image, `target.png` is the target, `NAME.png` is the panel NAME, and
`cls` is the class number.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import NamedTuple
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from paceline.contracts.data_spec import INPUT
from paceline.core.printable import printable
from paceline.core.storage.files import Span, StoredFile
from paceline.data.file_lists import HIDDEN, SUFFIXES, Problem, without_details
from paceline.data.panel_names import RESERVED
from paceline.data.shards.index import HEADER_BYTES, UNKNOWN, Member, ShardIndex
from paceline.data.shards.scan import LABEL_SUFFIX, PICKLES, parse_label

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


class Names:
    """The names of many samples, stored compactly."""

    def __init__(self, names: Iterable[str]) -> None:
        # Surrogates represent bytes that are not UTF-8.
        encoded = [name.encode(errors="surrogatepass") for name in names]
        self._ends = np.cumsum([0, *map(len, encoded)])
        self._text = b"".join(encoded)

    def __getitem__(self, index: int) -> str:
        return self._text[self._ends[index] : self._ends[index + 1]].decode(errors="surrogatepass")


@dataclass(frozen=True)
class SampleTable:
    """All usable samples of several shards, in order, without their content."""

    places: tuple[str, ...]  # path or URL of each shard
    images: Mapping[str, Placed]  # by field
    labels: NDArray[np.int64] | None
    label_members: Placed | None
    names: Names
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
        names = Names(self.names[int(row)] for row in rows)
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
        names=Names(sample.name for sample in usable),
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
