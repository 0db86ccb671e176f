"""Damaged, replaced or malicious shards, indexes and lists of shards are used correctly, or rejected in one line."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import shutil
import subprocess
import tarfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from made_data import encode_png, random_images, write_tar

from paceline.core.errors import UserError
from paceline.core.storage.reader import Reader
from paceline.data import shards
from paceline.data.shard_index import SUFFIX, scan
from paceline.data.sources.shards import Shards

pytestmark = pytest.mark.usefixtures("own_cache")
PIXELS = random_images(6, 10, 10, 3)
IMAGES = [encode_png(image) for image in PIXELS]
LABELS = [0, 1, 2, 0, 1, 2]
CHANGED = r"train-0\.tar/\d: does not match its checksum, so the shard was changed .*; restore the shard, or delete"
Change = Callable[[dict[str, Any]], object]


def members(labels: list[int]) -> dict[str, bytes]:
    return {f"{n}{end}": data for n in range(6) for end, data in ((".png", IMAGES[n]), (".cls", b"%d" % labels[n]))}


def renamed(content: dict[str, bytes]) -> dict[str, bytes]:
    """Return the same contents in the same places, where the labels of two samples have exchanged their names."""
    other = {"1.cls": "4.cls", "4.cls": "1.cls"}
    return {other.get(name, name): data for name, data in content.items()}


GOOD = members(LABELS)
OTHER = members([2, 2, 2, 0, 0, 0])


def signed(content: Any) -> str:
    """Return JSON with its checksum, which is right whatever the content is."""
    if not isinstance(content, dict):
        return json.dumps(content)
    return json.dumps(content | {"sha256": hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()})


def make_manifest() -> dict[str, Any]:
    splits = {"train": ["train-0.tar"], "test": ["test-0.tar"]}
    return {"version": 1, "splits": splits, "class_names": ["a", "b", "c"], "flip_allowed": True}


def make_index(file: Path) -> dict[str, Any]:
    """Return the index of a shard, made without Paceline: members of less than 512 bytes have one block of data."""
    content, rows, headers, offset = file.read_bytes(), [], [], 0
    for name, data in GOOD.items():
        start = offset + 512
        assert content[start : start + len(data)] == data
        side, label = (10, -1) if name.endswith(".png") else (0, int(data))
        rows.append([name, start, len(data), zlib.crc32(data), side, side, label, ""])
        headers.append(zlib.crc32(content[offset:start]))
        offset = start + -(-len(data) // 512) * 512
    return {"version": 1, "size": len(content), "problem": "", "members": rows, "headers": headers}


def write_shard(root: Path, content: dict[str, bytes], seconds: int = 10**9) -> None:
    write_tar(root / "train-0.tar", content)
    os.utime(root / "train-0.tar", (seconds, seconds))


def write_index(root: Path, split: str, change: Change = lambda index: None) -> None:
    index = make_index(root / f"{split}-0.tar")
    changed = change(index)
    (root / f"{split}-0.tar{SUFFIX}").write_text(signed(index if changed is None else changed))


def write_root(root: Path, manifest: Any, change_index: Change = lambda index: None) -> None:
    for split in ("train", "test"):
        write_tar(root / f"{split}-0.tar", GOOD)
        write_index(root, split, change_index if split == "train" else lambda index: None)
    (root / "shards.json").write_text(manifest if isinstance(manifest, str) else signed(manifest))


def open_shards(root: Path, split: str = "train", **settings: object) -> Shards:
    """Open the shards in a folder, after writing a test split if there is none."""
    if not any((root / name).exists() for name in ("test-0.tar", "shards.json")):
        write_tar(root / "test-0.tar", GOOD)
    return Shards(split, Shards.Settings(data="shards", data_root=str(root), workers=0, **settings))  # type: ignore[arg-type]


def read_labels(root: Path) -> list[int]:
    labels: list[int] = open_shards(root).read_many(np.arange(6))["label"].tolist()
    return labels


def read_all(root: Path) -> None:
    """Read all samples of both splits; whatever is read must be right."""
    for split in ("train", "test"):
        source = open_shards(root, split)
        found = source.read_many(np.arange(len(source)))
        rows = [int(source.name_of(row).rpartition("/")[2]) for row in range(len(source))]
        assert np.array_equal(found["image"], PIXELS[rows])
        assert found["label"].tolist() == [LABELS[row] for row in rows]


# Lists of shards and indexes made by strangers, whose checksums are right


def _put(**values: Any) -> Change:
    return lambda content: content.update(values)


def _shards(*names: Any) -> Change:
    return lambda content: content["splits"].update(train=list(names))


MANIFESTS: dict[str, Change] = {
    "a name of 5,000 characters": _shards("a" * 5000 + ".tar"),
    "a name with a NUL": _shards("a\0b.tar"),
    "a name that is not valid text": _shards("\ud800.tar"),
    "a name outside": _shards("../train-0.tar"),
    "an absolute name": _shards("/etc/passwd.tar"),
    "the name of a folder": _shards("folder.tar"),
    "a name twice": _shards("train-0.tar", "train-0.tar"),
    "a missing shard": _shards("train-1.tar"),
    "no shards": _shards(),
    "shards that are text": lambda content: content["splits"].update(train="train-0.tar"),
    "splits that are a list": _put(splits=["train"]),
    "no splits": _put(splits={}),
    "no training split": lambda content: content["splits"].pop("train") and None,
    "class names that are text": _put(class_names="abc"),
    "too few class names": _put(class_names=["a"]),
    "flip_allowed that is text": _put(flip_allowed="no"),
    "another version": _put(version=2),
    "no version": lambda content: content.pop("version") and None,
    "no class names": lambda content: content.pop("class_names") and None,
}
TEXTS = {
    "empty": "",
    "a list": "[]",
    "no checksum": json.dumps(make_manifest()),
    "nested deeply": "[" * 100_000,
    "cut off": signed(make_manifest())[:-9],
    "a huge number": '{"version": ' + "9" * 10_000 + "}",
    "not UTF-8": "\xff\xfe",
}


def test_a_list_of_shards_with_wrong_content_is_rejected_in_one_line(tmp_path: Path) -> None:
    for number, kind in enumerate([*MANIFESTS, *TEXTS]):
        root, content = tmp_path / str(number), make_manifest()
        if kind in MANIFESTS:
            MANIFESTS[kind](content)
        (root / "folder.tar").mkdir(parents=True)
        write_root(root, TEXTS.get(kind, content))
        with pytest.raises(UserError, match="--data-root") as caught:
            read_all(root)
        assert "\n" not in str(caught.value) and len(str(caught.value)) < 600, kind


def _row(column: int, value: Any, row: int = 0) -> Change:
    def change(index: dict[str, Any]) -> None:
        index["members"][row][column] = value

    return change


INDEXES: dict[str, Change] = {
    "a row less": lambda index: index["members"].pop() and None,
    "an offset outside": _row(1, 10**9),
    "a negative offset": _row(1, -512),
    "an offset of zero": _row(1, 0),
    "an offset that is huge": _row(1, 10**400),
    "an offset that is true": _row(1, True),
    "a size outside": _row(2, 10**9),
    "a size of zero": _row(2, 0),
    "a member that overlaps the next": _row(2, 2000),
    "another checksum": _row(3, 1),
    "a height of zero": _row(4, 0),
    "another height": _row(4, 5),
    "a huge height": _row(4, 2**31 - 1),
    "another label": _row(6, 1, 1),
    "a label above the classes": _row(6, 3, 1),
    "a problem with control characters": _row(7, "\x1b[2J\n"),
    "a name that is a number": _row(0, 3),
    "a name of 5,000 characters": _row(0, "a" * 5000 + ".png"),
    "a name that is not valid text": _row(0, "\ud800.png"),
    "a name with separators": _row(0, "../../etc/passwd.png"),
    "the name of another member": _row(0, "1.png"),
    "a label under another name": _row(0, "1.cls", 1),
    "a pickle": _row(0, "0.pkl"),
    "a row that is too long": lambda index: index["members"][0].append(1),
    "a row that is too short": lambda index: index["members"][0].pop() and None,
    "rows that are null": _put(members=None),
    "no rows": _put(members=[], headers=[]),
    "headers that are too few": _put(headers=[1]),
    "headers of other members": _put(headers=[1] * 12),
    "a size that is another": _put(size=512),
    "a problem of the shard": _put(problem="damaged"),
    "a problem of the shard that is a list": _put(problem=[]),
    "another version": _put(version=2),
    "no version": lambda index: index.pop("version") and None,
    "a list": lambda index: [index],
}


def test_an_index_with_wrong_content_is_rejected_in_one_line(tmp_path: Path) -> None:
    for number, (kind, change) in enumerate(INDEXES.items()):
        root = tmp_path / str(number)
        write_root(root, make_manifest(), change)
        with pytest.raises(UserError, match="--data-root") as caught:
            read_all(root)
        assert "\n" not in str(caught.value) and len(str(caught.value)) < 1000, kind


def test_an_index_from_another_program_is_used_without_a_scan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "scan", lambda *_: pytest.fail("the shard was scanned"))
    for number, change in enumerate((lambda index: None, _put(extra=1), _row(6, 2))):
        write_root(tmp_path / str(number), make_manifest() | {"extra": None}, change)
        read_all(tmp_path / str(number))
    shutil.copytree(tmp_path / "0", tmp_path / "copy", copy_function=shutil.copyfile)
    read_all(tmp_path / "copy")


def test_a_damaged_or_outdated_index_beside_a_shard_is_reported(tmp_path: Path) -> None:
    write_root(tmp_path, make_manifest())
    index = tmp_path / f"train-0.tar{SUFFIX}"
    index.write_bytes(index.read_bytes().replace(b'"2.png"', b'"7.png"'))
    with pytest.raises(UserError, match=r"0\.tar\.index\.json: the index does not match its recorded SHA-256"):
        open_shards(tmp_path)
    write_index(tmp_path, "train")
    write_tar(tmp_path / "train-0.tar", GOOD | {f"more{n}.png": IMAGES[0] for n in range(30)})
    with pytest.raises(UserError, match=r"made for a shard of .* bytes, but train-0\.tar has"):
        open_shards(tmp_path)


# Shards that were replaced


@pytest.mark.parametrize("place", ["beside the shard", "in the cache folder"])
def test_other_labels_in_a_shard_of_equal_size_are_found(place: str, tmp_path: Path) -> None:
    write_shard(tmp_path, GOOD)
    if place == "beside the shard":
        write_index(tmp_path, "train")
    assert read_labels(tmp_path) == LABELS
    for content in (OTHER, renamed(GOOD)):
        write_shard(tmp_path, content)
        with pytest.raises(UserError, match=CHANGED) as caught:
            read_labels(tmp_path)
        assert "\n" not in str(caught.value)
    if place == "in the cache folder":  # the modification time selects the index
        write_shard(tmp_path, OTHER, 10**9 + 7)
        assert read_labels(tmp_path) == [2, 2, 2, 0, 0, 0]


def test_an_index_that_claims_other_labels_or_sizes_than_its_shard_is_found(tmp_path: Path) -> None:
    write_shard(tmp_path, GOOD)
    write_index(tmp_path, "train", _row(6, 2, 7))
    with pytest.raises(UserError, match=CHANGED):
        read_labels(tmp_path)
    # Squares have the smallest side of all images, so one wrong size would change all of them.
    write_index(tmp_path, "train", lambda index: index["members"][0].__setitem__(slice(4, 6), [1, 1]))
    with pytest.raises(UserError, match=r"train-0\.tar/0: the image is 10×10 pixels, but .* 1×1"):
        read_labels(tmp_path)


def test_a_shard_that_is_replaced_or_damaged_during_a_run_is_found(tmp_path: Path) -> None:
    for content in (OTHER, renamed(GOOD)):
        write_shard(tmp_path, GOOD)
        source = open_shards(tmp_path)
        assert source.read(4)["label"] == 1
        write_shard(tmp_path, content)
        with pytest.raises(UserError, match=CHANGED):
            source.read(4)
    write_shard(tmp_path, GOOD)
    source, file = open_shards(tmp_path), tmp_path / "train-0.tar"
    damaged = bytearray(file.read_bytes())
    at = damaged.index(b"IDAT") + 20
    damaged[at : at + 4] = b"\0\0\0\0"
    file.write_bytes(damaged)
    with pytest.raises(UserError, match=r"train-0\.tar/0: does not match its checksum"):
        source.read(0)
    assert source.read(1)["label"] == 1


def test_a_shard_that_is_replaced_while_it_is_indexed_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def replaced(reader: Reader, file: Any) -> Any:
        index = scan(reader, file)
        write_shard(tmp_path, OTHER, 10**9 + 7)
        return index

    write_shard(tmp_path, GOOD)
    write_tar(tmp_path / "test-0.tar", GOOD)
    monkeypatch.setattr(shards, "scan", replaced)
    with pytest.raises(UserError, match=r"train-0\.tar: its size, .* changed while it was read; run the same"):
        open_shards(tmp_path)
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user-cache"))
    assert read_labels(tmp_path) == [2, 2, 2, 0, 0, 0]


# Members and tar files that cannot be used


BAD_MEMBERS = {
    "missing": ({name: data for name, data in GOOD.items() if name != "2.cls"}, "2: no member for 'label'"),
    "no image": (GOOD | {"9.cls": b"1"}, "9: no member for 'image'"),
    "two images": (GOOD | {"2.jpg": IMAGES[0]}, r"2: 2\.jpg: one of several members for 'image'"),
    "twice": ([*GOOD.items(), ("2.png", IMAGES[0])], r"2: 2\.png: one of several members for 'image'"),
    "pickle": (GOOD | {"2.pyd": b"\x80\x04"}, r"2: 2\.pyd: pickled data is not read"),
    "word": (GOOD | {"2.cls": b"cat"}, r"2: 2\.cls: not a class number"),
    "ID": (GOOD | {"2.cls": b"4000000000"}, r"2: 2\.cls: a class number above 10,000,000"),
    "long number": (GOOD | {"2.cls": b"9" * 5000}, r"2: 2\.cls: a class number above 10,000,000"),
    "mask": (GOOD | {"2.label.png": IMAGES[2]}, r"2: 2\.label\.png: 'label' is the name of another field"),
    "text": (GOOD | {"2.png": b"hello"}, r"2: 2\.png: unreadable image"),
}


def test_unusable_samples_are_reported_or_left_out(tmp_path: Path) -> None:
    for number, (kind, (content, message)) in enumerate(BAD_MEMBERS.items()):
        root = tmp_path / str(number)
        write_tar(root / "train-0.tar", content)
        with pytest.raises(UserError, match=rf"--data-root .*: train-0\.tar/{message}.*--bad-images skip"):
            open_shards(root)
        source = open_shards(root, bad_images="skip")
        assert len(source) == (6 if kind == "no image" else 5) and len(source.not_used) == 1, kind
        assert any("left out 1 of " in note for note in source.notes)


def test_damaged_pixels_are_found_when_read_or_left_out_at_the_start(tmp_path: Path) -> None:
    write_tar(tmp_path / "train-0.tar", GOOD | {"2.png": IMAGES[2][:200]})
    with pytest.raises(UserError, match=r"train-0\.tar/2: unreadable image .*--bad-images skip"):
        open_shards(tmp_path).read(2)
    assert len(open_shards(tmp_path, bad_images="skip")) == 5


def test_pairs_of_different_sizes_are_reported_or_left_out(tmp_path: Path) -> None:
    large = encode_png(random_images(12, 12, 3))
    pairs = {f"{n}.{kind}.png": IMAGES[n] for n in range(4) for kind in ("input", "target")} | {"1.target.png": large}
    write_tar(tmp_path / "train-0.tar", pairs)
    with pytest.raises(UserError, match=r"train-0\.tar/1\.image is 10×10 pixels but train-0\.tar/1\.target is 12×12"):
        open_shards(tmp_path)
    assert len(open_shards(tmp_path, bad_images="skip")) == 3


def test_a_truncated_or_damaged_tar_file_is_reported(tmp_path: Path) -> None:
    write_tar(tmp_path / "train-0.tar", GOOD, tarfile.USTAR_FORMAT)
    file, content = tmp_path / "train-1.tar", (tmp_path / "train-0.tar").read_bytes()
    end = content.rindex(b"5.cls")  # header of the last member
    for damaged, message in (
        (content[:3000], "truncated"),
        (content[: end + 100], "no end marker"),
        (content[:end], "no end marker"),
        (content[:end] + b"x" * 2048, "no end marker"),
        (content + content, "data after the end marker"),
        (gzip.compress(content), "not an uncompressed tar file"),
        (b"hello" * 1024, "not an uncompressed tar file"),
        (b"", "truncated"),
    ):
        file.write_bytes(damaged)
        with pytest.raises(UserError, match=rf"train-1\.tar: .*{message}"):
            open_shards(tmp_path)
        source = open_shards(tmp_path, bad_images="skip")
        assert 6 <= len(source) <= 12 and any("train-1.tar" in line for line in source.not_used)


def test_names_in_a_tar_file_are_never_used_as_paths(tmp_path: Path) -> None:
    outside, root = tmp_path / "outside.png", tmp_path / "root"
    names = [f"../{n}.png" for n in range(3)] + [str(outside), "a\nb\x1b[2J.png"]
    write_tar(root / "train-0.tar", {name: IMAGES[0] for name in names})
    link = tarfile.TarInfo("link.png")
    link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
    with tarfile.open(root / "train-0.tar", "a") as archive:
        archive.addfile(link)
    with pytest.raises(UserError, match=r"link: link\.png: symbolic links are not supported") as caught:
        open_shards(root)
    assert "\n" not in str(caught.value)
    source = open_shards(root, bad_images="skip", crop=8)
    assert source.read_many(np.arange(5))["image"].shape == (5, 10, 10, 3)
    assert not outside.exists() and "\x1b" not in "".join(source.notes)


def _extended(kind: bytes, content: bytes) -> bytes:
    """Return an extended tar header, which describes the next members."""
    header = tarfile.TarInfo("x")
    header.type, header.size = kind, len(content)
    return header.tobuf(tarfile.GNU_FORMAT) + content.ljust(-(-len(content) // 512) * 512, b"\0")


def _record(name: str, value: bytes) -> bytes:
    """Return a record of an extended header, which starts with its own length."""
    rest = b" %s=%s\n" % (name.encode(), value)
    length = next(length for length in range(len(rest), len(rest) + 9) if len(str(length)) + len(rest) == length)
    return b"%d%s" % (length, rest)


def _member(name: str, content: bytes) -> bytes:
    header = tarfile.TarInfo(name)
    header.size = len(content)
    return header.tobuf(tarfile.GNU_FORMAT) + content.ljust(-(-len(content) // 512) * 512, b"\0")


def _sized(size: int, kind: bytes = tarfile.REGTYPE) -> bytes:
    """Return the header of a member that declares this size."""
    header = tarfile.TarInfo("1.png")
    header.type, header.size = kind, size
    return header.tobuf(tarfile.GNU_FORMAT)


def _globals(number: int) -> bytes:
    return _extended(tarfile.XGLTYPE, b"".join(b"10 a%03d=b\n" % key for key in range(10 * number, 10 * number + 10)))


HOSTILE_HEADERS = {
    "a header of digits": (_extended(tarfile.XHDTYPE, b"1" * 60_000), "more than 255 consecutive digits"),
    "records that overlap": (_extended(tarfile.XHDTYPE, b"2 " * 30_000 + b"k=v\n"), "damaged extended header"),
    "a record that is too long": (_extended(tarfile.XHDTYPE, b"99 a=b\n"), "damaged extended header"),
    "a value of digits": (
        _extended(tarfile.XHDTYPE, _record("comment", b"1" * 1000)),
        "more than 255 consecutive digits",
    ),
    "a long header": (
        _extended(tarfile.XHDTYPE, _record("comment", b"a" * 100_000)),
        "the limit for a member is 65,536",
    ),
    "a long name": (_extended(tarfile.GNUTYPE_LONGNAME, b"a" * 100_000), "the limit for a member is 65,536"),
    "many values for all members": (
        b"".join(_globals(n) + _member(f"{n}.txt", b"") for n in range(20)),
        "more than 100",
    ),
    "a negative size": (_sized(-512), ""),
    "a huge size": (_sized(2**40), ""),
    "a long chain of names": (_extended(tarfile.GNUTYPE_LONGNAME, b"21 comment=aaaaaaaaa\n") * 3000, ""),
    "a long chain of headers": (_extended(tarfile.XHDTYPE, b"21 comment=aaaaaaaaa\n") * 3000, ""),
    "a sparse file of negative size": (
        _member("0.txt", b"") + _member("1.txt", b"") + _sized(-1024, tarfile.GNUTYPE_SPARSE),
        "'1.txt' comes after a later member",
    ),
    "many long headers": (_extended(tarfile.XHDTYPE, _record("comment", b"a" * 30_000)) * 3, "more than 65,536 bytes"),
}


def test_tar_headers_that_hold_too_much_end_the_scan(tmp_path: Path) -> None:
    rest = b"".join(map(_member, GOOD, GOOD.values())) + bytes(1024)
    for headers, message in HOSTILE_HEADERS.values():
        (tmp_path / "train-0.tar").write_bytes(headers + rest)
        with pytest.raises(UserError, match=rf"train-0\.tar: truncated, or not an uncompressed tar .*\(.*{message}"):
            open_shards(tmp_path)


def test_long_tar_headers_of_common_programs_are_read(tmp_path: Path) -> None:
    rest = _member("a.txt", b"") + b"".join(map(_member, GOOD, GOOD.values())) + bytes(1024)
    for header in (
        _extended(tarfile.XHDTYPE, b"".join(_record(f"SCHILY.xattr.user.{n}", b"v" * 1000) for n in range(50))),
        _extended(tarfile.XGLTYPE, _record("comment", b"0123456789" * 4)),  # as from git archive
        _extended(tarfile.XHDTYPE, _record("path", b"long/" + b"9" * 212 + b".txt")),
    ):
        (tmp_path / "train-0.tar").write_bytes(header + rest)
        assert len(open_shards(tmp_path)) == 6


def test_a_sparse_file_is_left_out_and_the_rest_of_the_shard_is_used(tmp_path: Path) -> None:
    if "GNU" not in subprocess.run(["tar", "--version"], capture_output=True, text=True).stdout:
        pytest.skip("needs GNU tar")
    for name, content in GOOD.items():
        (tmp_path / name).write_bytes(content)
    with (tmp_path / "2.png").open("ab") as file:
        file.truncate(2**24)
    (tmp_path / "root").mkdir()
    subprocess.run(["tar", "--sparse", "-cf", "root/train-0.tar", *GOOD], cwd=tmp_path, check=True)
    with pytest.raises(UserError, match=r"train-0\.tar/2: 2\.png: sparse files are not supported"):
        open_shards(tmp_path / "root")
    assert len(open_shards(tmp_path / "root", bad_images="skip")) == 5


def test_notes_list_only_the_most_frequent_suffixes(tmp_path: Path) -> None:
    others = {f"x{n}.\x1b[2J{n}": b"" for n in range(100)} | {f"y{n}.txt": b"" for n in range(3)}
    write_tar(tmp_path / "train-0.tar", GOOD | others)
    (note,) = open_shards(tmp_path).notes
    assert ".txt (3)" in note and note.endswith("more") and len(note) < 500 and "\x1b" not in note


# Folders and lists without usable shards


def test_roots_without_usable_shards_are_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # without --data-root, a folder `data` here would be used
    monkeypatch.setattr(shards, "MAX_SHARDS", 1000)
    for name in ("empty", "packed", "texts"):
        (tmp_path / name).mkdir()
    (tmp_path / "packed" / "0.tar.gz").write_bytes(b"")
    write_tar(tmp_path / "texts" / "0.tar", {"readme.txt": b"hello"})
    write_tar(tmp_path / "versions" / "0.tar", {f"{n}.v1.png": image for n, image in enumerate(IMAGES)})
    write_tar(tmp_path / "dots" / "0.tar", {f"{n}.v1.x.png": image for n, image in enumerate(IMAGES)})
    for root, message in (
        ("", "needs --data-root"),
        (tmp_path / "empty", r"no \.tar files found; create some with paceline pack SRC DST --to-shards"),
        (tmp_path / "nowhere", r"--data-root .*nowhere: no such folder"),
        (tmp_path / "packed", r"0\.tar\.gz is compressed, and not used; decompress it"),
        (tmp_path / "packed" / "0.tar.gz", r"0\.tar\.gz: is compressed; decompress it"),
        (tmp_path / "texts", "no images found"),
        (tmp_path / "versions", r"0\.tar/0: no member for 'image', only for v1"),
        (tmp_path / "dots", r"no images found \(members that are not used: \.png after several dots \(6\)\)"),
        (f"{tmp_path}/texts/{{0,0}}.tar", r"0\.tar is listed twice"),
        ("s3://{a,b}/0.tar", "braces are not supported in the host or bucket"),
        (f"{tmp_path}/{{0..99}}-{{0..99}}.tar", "expands to more than 1,000 shards"),
        ("/no-such-shard-{0..1}.tar", r"--data-root /: no-such-shard-0\.tar: no such file"),
    ):
        with pytest.raises(UserError, match=message):
            Shards("train", Shards.Settings(data="shards", **({"data_root": str(root)} if root else {})))
    write_tar(tmp_path / "packed" / "train-0.tar", GOOD)
    assert any("0.tar.gz is compressed, and not used" in note for note in open_shards(tmp_path / "packed").notes)
