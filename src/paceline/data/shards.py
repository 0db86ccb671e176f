"""Shards: tar files in the WebDataset layout. Finds those of each split, and the samples that their members form."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import NamedTuple
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from paceline.contracts.data_spec import INPUT
from paceline.core.errors import UserError
from paceline.core.files import (
    MAX_BYTES,
    Lock,
    checksum_of_content,
    json_text,
    parse_json,
    read_bounded,
    user_cache,
    write_file,
)
from paceline.core.storage.files import Span, Storage, StoredFile
from paceline.core.storage.reader import Reader, key_of
from paceline.core.terminal import activity, counted
from paceline.core.text import printable, redact
from paceline.data.file_lists import HIDDEN, SUFFIXES, first_few
from paceline.data.shard_index import (
    HEADER_BYTES,
    LABEL_SUFFIX,
    MAX_INDEX_BYTES,
    PICKLES,
    SUFFIX,
    Member,
    ShardIndex,
    parse_label,
    scan,
)
from paceline.data.source import LABEL, RESERVED

MANIFEST, VERSION = "shards.json", 1
CLASS_NAMES = "classnames.txt"  # one name per line
TAR = ".tar"
COMPRESSED = (".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".tar.zst")
MAX_SHARDS = 1_000_000
TRAIN_WORDS = ("train", "training")
TEST_WORDS = ("test", "val", "valid", "validation")  # in order of preference
_BRACES = re.compile(r"\{(?:(?P<first>\d+)\.\.(?P<last>\d+)|(?P<words>[^{}]*,[^{}]*))\}")


class Catalog(NamedTuple):
    """The shards under a root."""

    storage: Storage
    splits: Mapping[str, tuple[StoredFile, ...]]  # by split; a single entry "" if there are no splits
    indexed: frozenset[str] | None  # names of shards with an index beside them; None if this is not known
    class_names: tuple[str, ...] = ()
    flip_allowed: bool = True  # whether a flipped image is still a valid sample
    notes: tuple[str, ...] = ()


def open_catalog(root: str, flag: str) -> Catalog:
    """List the shards under the root that `flag` sets; raise UserError if there are none."""
    if "{" in root or _is_shard(root):
        return _from_list(root, flag)
    if root.lower().endswith(COMPRESSED):
        raise UserError(f"{flag} {redact(root)}: is compressed; decompress it to a .tar file")
    storage = Storage(root, flag)
    content = storage.read_file(MANIFEST, MAX_BYTES)
    if content is not None:
        return _from_manifest(storage, content)
    files = {file.name: file for file in storage.list_files()}
    shards = [name for name in files if _is_shard(name)]
    compressed = [name for name in files if name.lower().endswith(COMPRESSED)]
    unused = f"{first_few(compressed)} is compressed, and not used; decompress it to a .tar file" if compressed else ""
    if not shards:
        create = "no .tar files found; create some with paceline pack SRC DST --to-shards"
        raise UserError(f"{storage.shown}: {unused or create}")
    if any(files[name].size < 0 for name in shards):
        files |= {file.name: file for file in storage.describe_files(shards)}
    splits, notes = _split(shards)
    return Catalog(
        storage,
        {split: tuple(files[name] for name in names) for split, names in splits.items()},
        frozenset(name for name in shards if name + SUFFIX in files),
        _class_names(storage) if CLASS_NAMES in files else (),
        notes=tuple(f"{storage.shown}: {note}" for note in [*notes, unused] if note),
    )


def _from_list(root: str, flag: str) -> Catalog:
    shown = f"{flag} {redact(root)}"
    base, slash, pattern = root.partition("{")[0].rpartition("/")
    pattern += root[len(base) + len(slash) + len(pattern) :]
    if base.endswith((":", ":/")):
        raise UserError(f"{shown}: braces are not supported in the host or bucket; use one URL")
    names = list(islice(_expand(pattern, shown), MAX_SHARDS + 1))
    if len(names) > MAX_SHARDS:
        raise UserError(f"{shown}: expands to more than {MAX_SHARDS:,} shards; use fewer")
    storage = Storage(base or slash or ".", flag)
    return Catalog(storage, {"": tuple(storage.describe_files(_unique(names, shown)))}, None)


def _is_shard(name: str) -> bool:
    return name.lower().endswith(TAR)


def _unique(names: Sequence[str], shown: str) -> Sequence[str]:
    twice = next((name for name, count in Counter(names).items() if count > 1), None)
    if twice is not None:
        raise UserError(f"{shown}: {printable(twice)} is listed twice; list it once")
    return names


def encode_manifest(splits: Mapping[str, Sequence[str]], class_names: Sequence[str], flip_allowed: bool) -> str:
    """Return the content of `shards.json`."""
    content = {"version": VERSION, "splits": splits, "class_names": list(class_names), "flip_allowed": flip_allowed}
    return json_text(content | {"sha256": checksum_of_content(content)}, indent=1) + "\n"


class ShardManifest(NamedTuple):
    """The content of `shards.json`."""

    splits: Mapping[str, Sequence[str]]  # names of the shards of each split
    class_names: tuple[str, ...]
    flip_allowed: bool


def parse_manifest(content: bytes, shown: str) -> ShardManifest:
    """Parse `shards.json` in the folder `shown`; raise UserError if it is damaged."""
    try:
        read = parse_json(content)
        if read.pop("sha256") != checksum_of_content(read) or read["version"] != VERSION:
            raise ValueError("checksum or version mismatch")
        splits = {split: [_safe_name(name) for name in names] for split, names in read["splits"].items()}
        class_names, flip_allowed = read["class_names"], read["flip_allowed"]
        lists = [class_names, *read["splits"].values()]
        if type(flip_allowed) is not bool or any(type(names) is not list for names in lists):
            raise ValueError("a value has the wrong type")
        if not all(isinstance(name, str) for name in class_names):
            raise ValueError("a class name is not text")
        return ShardManifest(splits, tuple(class_names), flip_allowed)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{shown}: {MANIFEST} is damaged ({error}); write the shards again") from None


def _from_manifest(storage: Storage, content: bytes) -> Catalog:
    manifest = parse_manifest(content, storage.shown)
    described = {
        split: tuple(storage.describe_files(_unique(names, storage.shown))) for split, names in manifest.splits.items()
    }
    indexed = frozenset(name for names in manifest.splits.values() for name in names)
    return Catalog(storage, described, indexed, manifest.class_names, manifest.flip_allowed)


def _safe_name(name: object) -> str:
    if not isinstance(name, str) or not _is_shard(name) or name.startswith("/") or ".." in name.split("/"):
        raise ValueError(f"{name!r:.100} is not the name of a shard")
    return name


def _split(names: Sequence[str]) -> tuple[dict[str, list[str]], list[str]]:
    """Return the shards of each split, found by words in their paths, and notes about shards that are not used."""
    words = {name: set(re.split(r"[^a-z]+", name.lower())) for name in names}
    train = [name for name in names if words[name] & set(TRAIN_WORDS)]
    test_word = next((word for word in TEST_WORDS if any(word in found for found in words.values())), "")
    test = [name for name in names if test_word in words[name] and name not in train]
    if not train or not test:
        return {"": list(names)}, []
    unused = [name for name in names if name not in {*train, *test}]
    notes = [f"{len(unused)} unused shards belong to no split, such as {printable(unused[0])}"] if unused else []
    return {"train": train, "test": test}, notes


def _class_names(storage: Storage) -> tuple[str, ...]:
    content = storage.read_file(CLASS_NAMES, MAX_BYTES) or b""
    return tuple(line.strip() for line in content.decode(errors="replace").splitlines() if line.strip())


def _expand(pattern: str, shown: str) -> Iterator[str]:
    """Yield the names that a pattern with braces stands for: `{000..127}` or `{train,test}`."""
    match = _BRACES.search(pattern)
    if match is None:
        if "{" in pattern:
            raise UserError(f"{shown}: invalid braces; write them as {{000..127}} or {{a,b}}")
        yield pattern
        return
    if match["words"] is not None:
        values = match["words"].split(",")
    else:
        first, last = int(match["first"]), int(match["last"])
        if not first <= last < first + MAX_SHARDS:
            raise UserError(f"{shown}: {match[0]} must be an increasing range of at most {MAX_SHARDS:,} numbers")
        values = [f"{number:0{len(match['first'])}d}" for number in range(first, last + 1)]
    for value in values:
        yield from _expand(pattern[: match.start()] + value + pattern[match.end() :], shown)


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
        indexes = threads.map(lambda shard: _load(catalog, shard, reader, folder), shards)
        return list(zip(shards, counted(indexes, shown, len(shards)), strict=True))


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
    problems: tuple[str, ...]  # samples and shards that cannot be used, each with the reason
    ignored: Counter[str]  # number of members that are not used, by suffix

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


class _Sample(NamedTuple):
    name: str
    shard: int
    fields: dict[str, Member]
    problem: str


def make_table(shards: Sequence[tuple[StoredFile, ShardIndex]]) -> SampleTable:
    """Return the samples in all shards; leave out those without the fields that most samples have."""
    problems = [f"{printable(file.name)}: {index.problem}" for file, index in shards if index.problem]
    ignored: Counter[str] = Counter()
    samples = [one for row, (file, index) in enumerate(shards) for one in _samples(row, file.name, index, ignored)]
    counted = Counter(frozenset(sample.fields) for sample in samples if not sample.problem)
    common = max(((count, len(fields), sorted(fields)) for fields, count in counted.items()), default=(0, 0, []))[-1]
    fields = sorted({INPUT, *common}, key=lambda field: (field != INPUT, field)) if samples else []
    usable = []
    for sample in samples:
        absent, name = sorted(set(fields) - sample.fields.keys()), f"{printable(sample.name):.200}"
        if sample.problem:
            problems.append(sample.problem)
        elif absent:
            others = f", only for {', '.join(sorted(sample.fields))}" if absent[0] == INPUT and sample.fields else ""
            problems.append(f"{name}: no member for {absent[0]!r}{others}")
        else:
            usable.append(sample)
    return SampleTable(
        places=tuple(file.place for file, _ in shards),
        members={field: _members(field, usable) for field in fields},
        labels=np.array([sample.fields[LABEL].label for sample in usable]) if LABEL in fields else None,
        names=[sample.name for sample in usable],
        problems=tuple(problems),
        ignored=ignored,
    )


def _members(field: str, samples: Sequence[_Sample]) -> NDArray[np.void]:
    pairs = ((sample.shard, sample.fields[field]) for sample in samples)
    rows = [(shard, m.offset, m.size, m.crc32, m.header_crc32, m.height, m.width) for shard, m in pairs]
    return np.array(rows, dtype=MEMBER)


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


def _samples(shard: int, shard_name: str, index: ShardIndex, ignored: Counter[str]) -> list[_Sample]:
    """Return the samples of a shard, in the order of their first members."""
    samples: dict[str, dict[str, Member]] = {}
    problems: dict[str, str] = {}
    for member in index.members:
        (key, rest), path = split_name(member.name), PurePosixPath(member.name)
        if path.name.startswith(HIDDEN) or not rest:
            continue
        field, suffix = field_of(rest), path.suffix.lower()
        if not field and suffix not in PICKLES:
            ignored[f"{suffix} after several dots" if suffix in SUFFIXES else suffix] += 1
            continue
        fields = samples.setdefault(key, {})
        problem = member.problem or _wrong_use(field, rest, member)
        if not problem and field in fields:
            problem = f"one of several members for {field!r}"
        if problem:
            name = f"{printable(f'{shard_name}/{key}'):.200}"
            problems.setdefault(key, f"{name}: {printable(path.name):.200}: {problem}")
        fields[field] = member
    return [_Sample(f"{shard_name}/{key}", shard, fields, problems.get(key, "")) for key, fields in samples.items()]


def _wrong_use(field: str, rest: str, member: Member) -> str:
    """Return why an intact member cannot be used as this field; "" if it can."""
    if field == LABEL and f".{rest}" == LABEL_SUFFIX:
        return "" if member.label >= 0 else "no class number in the index"
    if field in RESERVED:
        return f"{field!r} is the name of another field; rename the image"
    return "" if member.height and member.width else "no image size in the index"
