"""Groups the members of shards into samples."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePosixPath
from typing import NamedTuple
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from paceline.contracts.data_spec import INPUT
from paceline.core.storage.files import Span, StoredFile
from paceline.core.text import printable
from paceline.data.file_lists import HIDDEN, SUFFIXES, Problem, without_details
from paceline.data.shards.index import HEADER_BYTES, LABEL_SUFFIX, PICKLES, Member, ShardIndex, parse_label
from paceline.data.source import LABEL, RESERVED

FIELD_NAMES = {"input": INPUT}  # names of fields in shards that differ from the names in samples


MEMBER = np.dtype(  # a member of a sample: where it is, its checksums, and the size of its image
    [
        *(("shard", "i4"), ("offset", "i8"), ("size", "i8"), ("crc32", "u4"), ("header_crc32", "u4")),
        *(("height", "i8"), ("width", "i8")),
    ]
)


@dataclass(frozen=True)
class SampleTable:
    """All usable samples of several shards, in order, without their content."""

    places: tuple[str, ...]  # path or URL of each shard
    members: Mapping[str, NDArray[np.void]]  # by field, "image" first: the MEMBER of each sample
    labels: NDArray[np.int64] | None
    names: list[str]
    problems: tuple[Problem, ...]  # samples and shards that cannot be used
    ignored: Mapping[str, int]  # number of members that are not used, by suffix

    def __len__(self) -> int:
        return len(self.names)

    @property
    def images(self) -> tuple[str, ...]:
        """The fields that are images."""
        return tuple(field for field in self.members if field != LABEL)

    def span(self, field: str, index: int) -> Span:
        """Return where a member of a sample is, with its tar header."""
        member = self.members[field][index]
        start = int(member["offset"])
        return Span(self.places[member["shard"]], start - HEADER_BYTES, start + int(member["size"]))

    def matches(self, field: str, index: int, content: bytes) -> bool:
        """Return whether a member, which was read with its tar header, has not changed since it was indexed."""
        member, header, content = self.members[field][index], content[:HEADER_BYTES], content[HEADER_BYTES:]
        if (crc32(content), crc32(header)) != (member["crc32"], member["header_crc32"]):
            return False
        try:
            return field != LABEL or self.labels is None or parse_label(content) == self.labels[index]
        except ValueError:
            return False

    def rows(self, rows: NDArray[np.int64]) -> SampleTable:
        """Return a table with some of the samples."""
        return replace(
            self,
            members={field: members[rows] for field, members in self.members.items()},
            labels=None if self.labels is None else self.labels[rows],
            names=[self.names[row] for row in rows.tolist()],
        )


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
        members={field: _members(field, usable) for field in sorted(fields, key=lambda field: (field != INPUT, field))},
        labels=np.array([sample.fields[LABEL].label for sample in usable]) if LABEL in fields else None,
        names=[sample.name for sample in usable],
        problems=tuple(problems),
        ignored=ignored,
    )


def _members(field: str, samples: Sequence[_Found]) -> NDArray[np.void]:
    pairs = ((sample.shard, sample.fields[field]) for sample in samples)
    rows = [(shard, m.offset, m.size, m.crc32, m.header_crc32, m.height, m.width) for shard, m in pairs]
    return np.array(rows, dtype=MEMBER)


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
