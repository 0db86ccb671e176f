"""A stranger's shards.json or index of a shard is either used correctly, or rejected in one line."""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from made_data import encode_png, random_images, write_tar

from paceline.core.errors import UserError
from paceline.data.sources.shards import Shards

pytestmark = pytest.mark.usefixtures("own_cache")
IMAGES = random_images(6, 10, 10, 3)
CONTENTS = [encode_png(image) for image in IMAGES]
LABELS = [0, 1, 2, 0, 1, 2]
MEMBERS = {f"{n}{end}": data for n in range(6) for end, data in ((".png", CONTENTS[n]), (".cls", b"%d" % LABELS[n]))}
Change = Callable[[dict[str, Any]], object]


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
    for name, data in MEMBERS.items():
        start = offset + 512
        assert content[start : start + len(data)] == data
        side, label = (10, -1) if name.endswith(".png") else (0, int(data))
        rows.append([name, start, len(data), zlib.crc32(data), side, side, label, ""])
        headers.append(zlib.crc32(content[offset:start]))
        offset = start + -(-len(data) // 512) * 512
    return {"version": 1, "size": len(content), "problem": "", "members": rows, "headers": headers}


def write_root(root: Path, manifest: Any, change_index: Change = lambda index: None) -> None:
    for split in ("train", "test"):
        write_tar(root / f"{split}-0.tar", MEMBERS)
        index = make_index(root / f"{split}-0.tar")
        changed = change_index(index) if split == "train" else None
        (root / f"{split}-0.tar.index.json").write_text(signed(index if changed is None else changed))
    (root / "shards.json").write_text(manifest if isinstance(manifest, str) else signed(manifest))


def read_all(root: Path) -> None:
    """Read all samples; whatever is read must be right."""
    settings = Shards.Settings(data="shards", data_root=str(root), workers=0)
    for split in ("train", "test"):
        source = Shards(split, settings)
        found = source.read_many(np.arange(len(source)))
        rows = [int(source.name_of(row).rpartition("/")[2]) for row in range(len(source))]
        assert np.array_equal(found["image"], IMAGES[rows])
        assert found["label"].tolist() == [LABELS[row] for row in rows]


def _put(**values: Any) -> Change:
    return lambda content: content.update(values)


def _shards(*names: Any) -> Change:
    return lambda content: content["splits"].update(train=list(names))


MANIFESTS: dict[str, Change] = {
    "a name of 5,000 characters": _shards("a" * 5000 + ".tar"),
    "a folder of 5,000 characters": _shards("a" * 5000 + "/a.tar"),
    "a name with a NUL": _shards("a\0b.tar"),
    "a name that is not valid text": _shards("\ud800.tar"),
    "a name outside": _shards("../train-0.tar"),
    "a name far outside": _shards("a/../../train-0.tar"),
    "an absolute name": _shards("/etc/passwd.tar"),
    "the name of a folder": _shards("folder.tar"),
    "a name twice": _shards("train-0.tar", "train-0.tar"),
    "a missing shard": _shards("train-1.tar"),
    "no shards": _shards(),
    "many shards": _shards(*[f"{n}.tar" for n in range(5000)]),
    "shards that are text": lambda content: content["splits"].update(train="train-0.tar"),
    "splits that are a list": _put(splits=["train"]),
    "no splits": _put(splits={}),
    "no training split": lambda content: content["splits"].pop("train") and None,
    "class names that are text": _put(class_names="abc"),
    "class names that are numbers": _put(class_names=[1, 2, 3]),
    "too few class names": _put(class_names=["a"]),
    "flip_allowed that is text": _put(flip_allowed="no"),
    "another version": _put(version=2),
    "a version that is NaN": _put(version=float("nan")),
    "no version": lambda content: content.pop("version") and None,
    "no class names": lambda content: content.pop("class_names") and None,
}
TEXTS = {
    "empty": "",
    "null": "null",
    "a list": "[]",
    "no checksum": json.dumps(make_manifest()),
    "a checksum that is a list": json.dumps(make_manifest() | {"sha256": []}),
    "nested deeply": "[" * 100_000,
    "cut off": signed(make_manifest())[:-9],
    "a huge number": '{"version": ' + "9" * 10_000 + "}",
    "not UTF-8": "\xff\xfe",
}


@pytest.mark.parametrize("kind", [*MANIFESTS, *TEXTS])
def test_a_list_of_shards_with_wrong_content_is_rejected_in_one_line(kind: str, tmp_path: Path) -> None:
    content: Any = TEXTS.get(kind) or make_manifest()
    if kind in MANIFESTS:
        MANIFESTS[kind](content)
    (tmp_path / "root" / "folder.tar").mkdir(parents=True)
    write_root(tmp_path / "root", content if kind in MANIFESTS else TEXTS[kind])
    with pytest.raises(UserError, match="--data-root") as caught:
        read_all(tmp_path / "root")
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 600


def _row(column: int, value: Any, row: int = 0) -> Change:
    def change(index: dict[str, Any]) -> None:
        index["members"][row][column] = value

    return change


INDEXES: dict[str, Change] = {
    "a row less": lambda index: index["members"].pop() and None,
    "an offset outside": _row(1, 10**9),
    "a negative offset": _row(1, -512),
    "an offset of zero": _row(1, 0),
    "an offset that is infinite": _row(1, float("inf")),
    "an offset that is huge": _row(1, 10**400),
    "an offset that is true": _row(1, True),
    "a size outside": _row(2, 10**9),
    "a negative size": _row(2, -1),
    "a size of zero": _row(2, 0),
    "a member that overlaps the next": _row(2, 2000),
    "another checksum": _row(3, 1),
    "a height of zero": _row(4, 0),
    "another height": _row(4, 5),
    "a huge height": _row(4, 2**31 - 1),
    "another label": _row(6, 1, 1),
    "a label above the classes": _row(6, 3, 1),
    "a huge label": _row(6, 10**7, 1),
    "a problem with control characters": _row(7, "\x1b[2J\n"),
    "a name that is a number": _row(0, 3),
    "a name of 5,000 characters": _row(0, "a" * 5000 + ".png"),
    "a name that is empty": _row(0, ""),
    "a name that is not valid text": _row(0, "\ud800.png"),
    "a name with separators": _row(0, "../../etc/passwd.png"),
    "the name of another member": _row(0, "1.png"),
    "a label under another name": _row(0, "1.cls", 1),
    "a pickle": _row(0, "0.pkl"),
    "a row that is too long": lambda index: index["members"][0].append(1),
    "a row that is too short": lambda index: index["members"][0].pop() and None,
    "a row that is text": lambda index: index["members"].__setitem__(0, "abcdefgh"),
    "rows that are null": _put(members=None),
    "no rows": _put(members=[], headers=[]),
    "headers that are too few": _put(headers=[1]),
    "no headers": lambda index: index.pop("headers") and None,
    "headers that are text": _put(headers=["1"] * 12),
    "headers of other members": _put(headers=[1] * 12),
    "headers below zero": _put(headers=[-2] * 12),
    "a size that is another": _put(size=512),
    "a problem of the shard": _put(problem="damaged"),
    "a problem of the shard that is a list": _put(problem=[]),
    "another version": _put(version=2),
    "no version": lambda index: index.pop("version") and None,
    "a list": lambda index: [index],
    "a number": lambda index: 3,
}


@pytest.mark.parametrize("kind", INDEXES)
def test_an_index_with_wrong_content_is_rejected_in_one_line(kind: str, tmp_path: Path) -> None:
    write_root(tmp_path / "root", make_manifest(), INDEXES[kind])
    with pytest.raises(UserError, match="--data-root") as caught:
        read_all(tmp_path / "root")
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 1000


@pytest.mark.parametrize("change", [lambda index: None, _put(extra=1), _row(6, 2)])
def test_an_index_from_another_program_is_used(change: Change, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.data.shards.catalog.scan", lambda *_: pytest.fail("the shard was scanned"))
    write_root(tmp_path / "root", make_manifest() | {"extra": None}, change)
    read_all(tmp_path / "root")
