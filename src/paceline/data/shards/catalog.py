"""Finds the shards of each split under a root, and their class names.

`shards.json`, which `paceline pack --to-shards` writes, lists the shards of each split. Without this file, all .tar
files under the root are used, and words in their paths select the split: `train/0.tar` and `test/0.tar`, or
`x-train-0.tar` and `x-val-0.tar`. A root may also be a list of shards, such as `https://host/x-{000..127}.tar`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import NamedTuple

from paceline.core.checksums import checksum_of_content
from paceline.core.errors import UserError
from paceline.core.files import json_text
from paceline.core.printable import printable
from paceline.core.secrets import redact
from paceline.core.small_files import MAX_BYTES, parse_json
from paceline.core.storage.files import Storage, StoredFile
from paceline.data.shards.index import SUFFIX

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
    if not shards:
        raise _no_shards(storage, compressed)
    if any(files[name].size < 0 for name in shards):
        files |= {file.name: file for file in storage.describe_files(shards)}
    splits, notes = _split(shards)
    if compressed:
        example = printable(compressed[0])
        notes.append(f"compressed shards are not used: {example} ({len(compressed):,} in total); decompress them")
    return Catalog(
        storage,
        {split: tuple(files[name] for name in names) for split, names in splits.items()},
        frozenset(name for name in shards if name + SUFFIX in files),
        _class_names(storage) if CLASS_NAMES in files else (),
        notes=tuple(f"{storage.shown}: {note}" for note in notes),
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


def describe_detection(storage: Storage, shards: Sequence[StoredFile]) -> tuple[str, ...]:
    """Return a note if Paceline could not detect that a shard was replaced by another one of the same size."""
    if storage.is_local or all(shard.version for shard in shards):
        return ()
    return (
        f"{storage.shown}: the server reports neither an ETag nor a modification time; if you replace a shard, delete "
        "the cache folder",
    )


def encode_manifest(splits: Mapping[str, Sequence[str]], class_names: Sequence[str], flip_allowed: bool) -> str:
    """Return the content of `shards.json`."""
    content = {"version": VERSION, "splits": splits, "class_names": list(class_names), "flip_allowed": flip_allowed}
    return json_text(content | {"sha256": checksum_of_content(content)}, indent=1) + "\n"


class Manifest(NamedTuple):
    """The content of `shards.json`."""

    splits: Mapping[str, Sequence[str]]  # names of the shards of each split
    class_names: tuple[str, ...]
    flip_allowed: bool


def parse_manifest(content: bytes, shown: str) -> Manifest:
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
        return Manifest(splits, tuple(class_names), flip_allowed)
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


def _no_shards(storage: Storage, compressed: Sequence[str]) -> UserError:
    if compressed:
        return UserError(f"{storage.shown}: {printable(compressed[0])} is compressed; decompress it to a .tar file")
    return UserError(f"{storage.shown}: no .tar files found; create some with paceline pack SRC DST --to-shards")


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
