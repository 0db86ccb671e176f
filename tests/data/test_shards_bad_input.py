"""Damaged or malicious tar files give a one-line error with the file's name, or a list of samples that are left out."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import subprocess
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from made_data import encode_png, random_images, write_tar

from paceline.core.errors import UserError
from paceline.core.files import checksum_of_content
from paceline.core.storage.files import Storage
from paceline.core.storage.reader import Reader
from paceline.data.shards import catalog
from paceline.data.shards.index import SUFFIX, scan
from paceline.data.sources.shards import Shards

pytestmark = pytest.mark.usefixtures("own_cache")
IMAGES = [encode_png(image) for image in random_images(6, 10, 12, 3)]
GOOD = {
    f"{n}{end}": data for n, image in enumerate(IMAGES) for end, data in ((".png", image), (".cls", b"%d" % (n % 3)))
}


def open_shards(root: Path, **settings: object) -> Shards:
    (root / "test").mkdir(exist_ok=True)
    write_tar(root / "test" / "0.tar", GOOD)
    return Shards("train", Shards.Settings(data="shards", data_root=str(root), workers=0, **settings))  # type: ignore[arg-type]


BAD_MEMBERS = {
    "missing": ({name: data for name, data in GOOD.items() if name != "2.cls"}, "2: no member for 'label'"),
    "no image": (GOOD | {"9.cls": b"1"}, "9: no member for 'image'"),
    "two images": (GOOD | {"2.jpg": IMAGES[0]}, r"2: several members for 'image', such as 2\.jpg"),
    "twice": ([*GOOD.items(), ("2.png", IMAGES[0])], r"2: several members for 'image', such as 2\.png"),
    "pickle": (GOOD | {"2.pyd": b"\x80\x04"}, r"2: 2\.pyd: pickled data is not read"),
    "second pickle": (GOOD | {"2.target.pickle": b"\x80\x04"}, r"2: 2\.target\.pickle: pickled data is not read"),
    "word": (GOOD | {"2.cls": b"cat"}, r"2: 2\.cls: not a class number"),
    "ID": (GOOD | {"2.cls": b"4000000000"}, r"2: 2\.cls: a class number above 10,000,000"),
    "long number": (GOOD | {"2.cls": b"9" * 5000}, r"2: 2\.cls: a class number above 10,000,000"),
    "mask": (GOOD | {"2.label.png": IMAGES[2]}, r"2: 2\.label\.png: 'label' is the name of another field"),
    "other name": (GOOD | {"2.index.png": IMAGES[2]}, r"2: 2\.index\.png: 'index' is the name of another field"),
    "text": (GOOD | {"2.png": b"hello"}, r"2: 2\.png: unreadable image"),
    "empty": (GOOD | {"2.png": b""}, r"2: 2\.png: unreadable image \(the file is empty\)"),
}


@pytest.mark.parametrize("kind", BAD_MEMBERS)
def test_unusable_samples_are_reported_or_left_out(kind: str, tmp_path: Path) -> None:
    members, message = BAD_MEMBERS[kind]
    write_tar(tmp_path / "train" / "0.tar", members)
    with pytest.raises(UserError, match=rf"--data-root .*: train/0\.tar/{message}.*--bad-images skip"):
        open_shards(tmp_path)
    source = open_shards(tmp_path, bad_images="skip")
    assert len(source) == (6 if kind == "no image" else 5) and len(source.not_used) == 1
    assert any("left out 1 of " in note for note in source.notes)


def test_many_unusable_samples_are_counted_by_reason_with_three_examples_each(tmp_path: Path) -> None:
    texts = {f"text{number}.png": b"hello" for number in range(4)} | {f"text{number}.cls": b"0" for number in range(4)}
    write_tar(tmp_path / "train" / "0.tar", GOOD | texts | {"2.cls": b"cat"})
    (note,) = [one for one in open_shards(tmp_path, bad_images="skip").notes if "left out" in one]
    examples = ", ".join(f"train/0.tar/text{number}" for number in range(3))
    assert note.startswith("left out 5 of 10 samples in ")
    assert note.endswith(f": 4 × unreadable image ({examples}, …), 1 × not a class number (train/0.tar/2)")


def test_damaged_pixels_are_found_when_read_or_left_out_at_the_start(tmp_path: Path) -> None:
    write_tar(tmp_path / "train" / "0.tar", GOOD | {"2.png": IMAGES[2][:200]})
    with pytest.raises(UserError, match=r"train/0\.tar/2: unreadable image .*--bad-images skip"):
        open_shards(tmp_path).read(2)
    assert len(open_shards(tmp_path, bad_images="skip")) == 5


def test_pairs_of_different_sizes_are_reported_or_left_out(tmp_path: Path) -> None:
    large = encode_png(random_images(12, 12, 3))
    members = {f"{n}.{kind}.png": IMAGES[n] for n in range(4) for kind in ("input", "target")} | {"1.target.png": large}
    write_tar(tmp_path / "train" / "0.tar", members)
    with pytest.raises(UserError, match=r"train/0\.tar/1\.image is 12×10 pixels but train/0\.tar/1\.target is 12×12"):
        open_shards(tmp_path)
    assert len(open_shards(tmp_path, bad_images="skip")) == 3


def _cut(content: bytes, kind: str) -> bytes:
    end = content.rindex(b"5.cls")  # header of the last member
    return {
        "in the middle of a member": content[:3000],
        "in the middle of a header": content[: end + 100],
        "after a member": content[:end],
        "garbage": content[:end] + b"x" * 2048,
        "concatenated": content + content,
        "gzip": gzip.compress(content),
        "bzip2": bz2.compress(content),
        "xz": lzma.compress(content),
        "not tar": b"hello" * 1024,
        "empty": b"",
    }[kind]


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("in the middle of a member", "truncated"),
        ("in the middle of a header", "no end marker"),
        ("after a member", "no end marker"),
        ("garbage", "damaged at byte"),
        ("concatenated", "data after the end marker"),
        ("gzip", r"compressed with gzip, although its name ends in \.tar; decompress it"),
        ("bzip2", "compressed with bzip2"),
        ("xz", "compressed with xz"),
        ("not tar", "not an uncompressed tar file"),
        ("empty", "truncated"),
    ],
)
def test_a_truncated_or_damaged_tar_file_is_reported(kind: str, message: str, tmp_path: Path) -> None:
    write_tar(tmp_path / "train" / "0.tar", GOOD, tarfile.USTAR_FORMAT)
    file = tmp_path / "train" / "1.tar"
    file.write_bytes(_cut((tmp_path / "train" / "0.tar").read_bytes(), kind))
    with pytest.raises(UserError, match=rf"train/1\.tar: .*{message}"):
        open_shards(tmp_path)
    source = open_shards(tmp_path, bad_images="skip")
    assert 6 <= len(source) <= 12 and any("train/1.tar" in line for line in source.not_used)


def test_a_changed_shard_does_not_match_its_index(tmp_path: Path) -> None:
    file = tmp_path / "train" / "0.tar"
    write_tar(file, GOOD)
    source = open_shards(tmp_path)
    content = bytearray(file.read_bytes())
    at = content.index(b"IDAT") + 20
    content[at : at + 4] = b"\0\0\0\0"
    file.write_bytes(content)
    with pytest.raises(UserError, match=r"train/0\.tar/0: does not match its checksum"):
        source.read(0)
    assert np.array_equal(source.read(1)["label"], 1)


def test_a_damaged_or_outdated_index_beside_a_shard_is_reported(tmp_path: Path) -> None:
    write_tar(tmp_path / "train" / "0.tar", GOOD)
    index = tmp_path / "train" / f"0.tar{SUFFIX}"
    open_shards(tmp_path)
    kept = next(
        file
        for file in (tmp_path / "user-cache" / "paceline" / "shards" / "index").glob("*.json")
        if b'"2.png"' in file.read_bytes()
    )
    index.write_bytes(kept.read_bytes())
    assert len(open_shards(tmp_path)) == 6
    index.write_bytes(kept.read_bytes().replace(b'"2.png"', b'"7.png"'))
    with pytest.raises(UserError, match=r"0\.tar\.index\.json: the index does not match its recorded SHA-256"):
        open_shards(tmp_path)
    index.write_bytes(kept.read_bytes())
    write_tar(tmp_path / "train" / "0.tar", GOOD | {f"more{n}.png": IMAGES[0] for n in range(30)})
    with pytest.raises(UserError, match=r"made for a shard of .* bytes, but train/0\.tar has"):
        open_shards(tmp_path)


def test_names_in_a_tar_file_are_never_used_as_paths(tmp_path: Path) -> None:
    outside = tmp_path / "outside.png"
    names = [f"../{n}.png" for n in range(3)] + [str(outside), "a\nb\x1b[2J.png"]
    write_tar(tmp_path / "root" / "train" / "0.tar", {name: IMAGES[0] for name in names})
    link = tarfile.TarInfo("link.png")
    link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
    with tarfile.open(tmp_path / "root" / "train" / "0.tar", "a") as archive:
        archive.addfile(link)
    with pytest.raises(UserError, match=r"link: link\.png: symbolic links are not supported") as caught:
        open_shards(tmp_path / "root")
    assert "\n" not in str(caught.value)
    source = open_shards(tmp_path / "root", bad_images="skip", crop=8)
    assert source.read_many(np.arange(5))["image"].shape == (5, 10, 12, 3)
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


@pytest.mark.parametrize("kind", HOSTILE_HEADERS)
def test_tar_headers_that_hold_too_much_end_the_scan(kind: str, tmp_path: Path) -> None:
    headers, message = HOSTILE_HEADERS[kind]
    content = headers + b"".join(map(_member, GOOD, GOOD.values())) + bytes(1024)
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "0.tar").write_bytes(content)
    with pytest.raises(UserError, match=rf"train/0\.tar: truncated, or not an uncompressed tar file \(.*{message}"):
        open_shards(tmp_path)


@pytest.mark.parametrize(
    "header",
    [
        _extended(tarfile.XHDTYPE, b"".join(_record(f"SCHILY.xattr.user.{n}", b"v" * 1000) for n in range(50))),
        _extended(tarfile.XGLTYPE, _record("comment", b"0123456789" * 4)),
        _extended(tarfile.XHDTYPE, _record("path", b"long/" + b"9" * 212 + b".txt")),
    ],
    ids=["many attributes", "as from git archive", "a name of digits"],
)
def test_long_tar_headers_of_common_programs_are_read(header: bytes, tmp_path: Path) -> None:
    content = header + _member("a.txt", b"") + b"".join(map(_member, GOOD, GOOD.values())) + bytes(1024)
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "0.tar").write_bytes(content)
    assert len(open_shards(tmp_path)) == 6


def test_a_sparse_file_is_left_out_and_the_rest_of_the_shard_is_used(tmp_path: Path) -> None:
    if "GNU" not in subprocess.run(["tar", "--version"], capture_output=True, text=True).stdout:
        pytest.skip("needs GNU tar")
    for name, content in GOOD.items():
        (tmp_path / name).write_bytes(content)
    with (tmp_path / "2.png").open("ab") as file:
        file.truncate(2**24)
    (tmp_path / "root" / "train").mkdir(parents=True)
    subprocess.run(["tar", "--sparse", "-cf", "root/train/0.tar", *GOOD], cwd=tmp_path, check=True)
    with pytest.raises(UserError, match=r"train/0\.tar/2: 2\.png: sparse files are not supported"):
        open_shards(tmp_path / "root")
    assert len(open_shards(tmp_path / "root", bad_images="skip")) == 5


def test_a_name_in_an_index_that_is_not_valid_text_is_escaped(tmp_path: Path) -> None:
    write_tar(tmp_path / "train" / "0.tar", {f"{n}.png": image for n, image in enumerate(IMAGES)})
    index = index_of(tmp_path)
    index["members"][0][0] = "\ud800.png"
    write_index(tmp_path, index)
    assert open_shards(tmp_path).name_of(0) == "train/0.tar/\ud800"


def index_of(root: Path) -> dict[str, Any]:
    """Return the index of train/0.tar without its checksum."""
    storage = Storage(str(root / "train"), "test")
    (file,) = storage.describe_files(["0.tar"])
    index: dict[str, Any] = json.loads(scan(Reader(storage, [file], None, 0.0), file).encode())
    del index["sha256"]
    return index


def write_index(root: Path, index: dict[str, Any]) -> None:
    text = json.dumps(index | {"sha256": checksum_of_content(index)})
    (root / "train" / f"0.tar{SUFFIX}").write_text(text)


def test_notes_list_only_the_most_frequent_suffixes(tmp_path: Path) -> None:
    others = {f"x{n}.\x1b[2J{n}": b"" for n in range(100)} | {f"y{n}.txt": b"" for n in range(3)}
    write_tar(tmp_path / "train" / "0.tar", GOOD | others)
    (note,) = open_shards(tmp_path).notes
    assert ".txt (3)" in note and note.endswith(", …") and len(note) < 500 and "\x1b" not in note


def test_invalid_lists_of_shards_are_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalog, "MAX_SHARDS", 1000)
    write_tar(tmp_path / "0.tar", GOOD)
    for root, message in (
        (f"{tmp_path}/{{0,0}}.tar", r"0\.tar is listed twice"),
        ("s3://{a,b}/0.tar", "braces are not supported in the host or bucket"),
        (f"{tmp_path}/{{0..99}}-{{0..99}}.tar", "expands to more than 1,000 shards"),
        ("/no-such-shard-{0..1}.tar", r"--data-root /: no-such-shard-0\.tar: no such file"),
    ):
        with pytest.raises(UserError, match=message):
            Shards("train", Shards.Settings(data="shards", data_root=root))


def test_a_folder_without_usable_shards_is_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # without --data-root, a folder `data` here would be used
    with pytest.raises(UserError, match=r"no \.tar files found; create some with paceline pack SRC DST --to-shards"):
        Shards("train", Shards.Settings(data="shards", data_root=str(tmp_path)))
    with pytest.raises(UserError, match=r"--data-root .*nowhere: no such folder"):
        Shards("train", Shards.Settings(data="shards", data_root=str(tmp_path / "nowhere")))
    (tmp_path / "0.tar.gz").write_bytes(b"")
    with pytest.raises(UserError, match=r"0\.tar\.gz is compressed; decompress it"):
        Shards("train", Shards.Settings(data="shards", data_root=str(tmp_path)))
    with pytest.raises(UserError, match="needs --data-root"):
        Shards("train", Shards.Settings(data="shards"))
    write_tar(tmp_path / "0.tar", {"readme.txt": b"hello"})
    with pytest.raises(UserError, match="no images found"):
        Shards("train", Shards.Settings(data="shards", data_root=str(tmp_path)))


def test_a_compressed_shard_is_reported_whether_it_is_the_root_or_one_of_many(tmp_path: Path) -> None:
    subprocess.run(["tar", "-czf", tmp_path / "more.tar.gz", "-T", "/dev/null"], check=True)
    with pytest.raises(UserError, match=r"more\.tar\.gz: is compressed; decompress it"):
        Shards("train", Shards.Settings(data="shards", data_root=str(tmp_path / "more.tar.gz"), workers=0))
    write_tar(tmp_path / "train" / "0.tar", GOOD)
    assert any(
        "compressed shards are not used: more.tar.gz (1 in total)" in note for note in open_shards(tmp_path).notes
    )


@pytest.mark.parametrize(
    ("ending", "message"),
    [
        ("v1.png", r"train/0\.tar/0: no member for 'image', only for v1"),
        ("v1.x.png", r"no images found \(members that are not used: \.png after several dots \(6\)\)"),
    ],
)
def test_members_with_other_names_than_images_are_reported(ending: str, message: str, tmp_path: Path) -> None:
    write_tar(tmp_path / "train" / "0.tar", {f"{n}.{ending}": image for n, image in enumerate(IMAGES)})
    with pytest.raises(UserError, match=message):
        open_shards(tmp_path)
