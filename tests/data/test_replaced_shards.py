"""A shard that was replaced by one of equal size is detected before a sample with a wrong label is returned."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
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
IMAGES = random_images(6, 10, 12, 3)
CONTENTS = [encode_png(image) for image in IMAGES]
CHANGED = r"train-0\.tar/\d: does not match its checksum, so the shard was changed .*; restore the shard, or delete"


def members(labels: str) -> dict[str, bytes]:
    return {f"{n}{end}": data for n in range(6) for end, data in ((".png", CONTENTS[n]), (".cls", labels[n].encode()))}


def renamed(content: dict[str, bytes]) -> dict[str, bytes]:
    """Return the same contents in the same places, where the labels of two samples have exchanged their names."""
    other = {"1.cls": "4.cls", "4.cls": "1.cls"}
    return {other.get(name, name): data for name, data in content.items()}


def write_shard(root: Path, content: dict[str, bytes], seconds: int = 10**9) -> None:
    write_tar(root / "train-0.tar", content)
    os.utime(root / "train-0.tar", (seconds, seconds))


def index_beside(root: Path, change: Callable[[dict[str, Any]], None] = lambda index: None) -> None:
    """Write the index of a shard beside it."""
    storage = Storage(str(root), "test")
    (file,) = storage.describe_files(["train-0.tar"])
    index = json.loads(scan(Reader(storage, [file], None, 0.0), file).encode())
    del index["sha256"]
    change(index)
    text = json.dumps(index | {"sha256": checksum_of_content(index)})
    (root / f"train-0.tar{SUFFIX}").write_text(text)


def open_shards(root: Path) -> Shards:
    if not (root / "test-0.tar").is_file():
        write_tar(root / "test-0.tar", members("012012"))
    return Shards("train", Shards.Settings(data="shards", data_root=str(root), workers=0))


def read_all(root: Path) -> list[int]:
    labels: list[int] = open_shards(root).read_many(np.arange(6))["label"].tolist()
    return labels


@pytest.mark.parametrize("place", ["beside the shard", "in the cache folder"])
@pytest.mark.parametrize("seconds", [10**9, 10**9 + 7])
def test_other_labels_in_a_shard_of_equal_size_are_found(place: str, seconds: int, tmp_path: Path) -> None:
    write_shard(tmp_path, members("012012"))
    if place == "beside the shard":
        index_beside(tmp_path)
    assert read_all(tmp_path) == [0, 1, 2, 0, 1, 2]
    write_shard(tmp_path, members("222000"), seconds)
    if place == "in the cache folder" and seconds != 10**9:  # the modification time selects the index
        assert read_all(tmp_path) == [2, 2, 2, 0, 0, 0]
        return
    with pytest.raises(UserError, match=CHANGED) as caught:
        read_all(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("place", ["beside the shard", "in the cache folder"])
def test_members_that_were_renamed_are_found(place: str, tmp_path: Path) -> None:
    write_shard(tmp_path, members("012345"))
    if place == "beside the shard":
        index_beside(tmp_path)
    assert read_all(tmp_path) == [0, 1, 2, 3, 4, 5]
    write_shard(tmp_path, renamed(members("012345")))
    with pytest.raises(UserError, match=CHANGED):
        read_all(tmp_path)


def test_a_shard_and_its_index_that_were_copied_are_used_without_a_scan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_shard(tmp_path / "first", members("012012"))
    index_beside(tmp_path / "first")
    open_shards(tmp_path / "first")
    shutil.copytree(tmp_path / "first", tmp_path / "second", copy_function=shutil.copyfile)
    index_beside(tmp_path / "second")
    monkeypatch.setattr(catalog, "scan", lambda *_: pytest.fail("the shard was scanned"))
    (tmp_path / "second" / "test-0.tar").unlink()
    shutil.copyfile(tmp_path / "second" / "train-0.tar", tmp_path / "second" / "test-0.tar")
    shutil.copyfile(tmp_path / "second" / f"train-0.tar{SUFFIX}", tmp_path / "second" / f"test-0.tar{SUFFIX}")
    assert read_all(tmp_path / "second") == [0, 1, 2, 0, 1, 2]


def test_an_index_that_claims_other_labels_than_its_shard_is_found(tmp_path: Path) -> None:
    def change(index: dict[str, Any]) -> None:
        row = next(row for row in index["members"] if row[0] == "3.cls")
        row[6] = 2

    write_shard(tmp_path, members("012012"))
    index_beside(tmp_path, change)
    with pytest.raises(UserError, match=CHANGED):
        read_all(tmp_path)


def test_an_index_that_claims_another_image_size_is_found(tmp_path: Path) -> None:
    """Squares have the smallest side of all images, so one wrong size would change all of them."""

    def change(index: dict[str, Any]) -> None:
        index["members"][0][4:6] = 1, 1

    write_shard(tmp_path, members("012012"))
    index_beside(tmp_path, change)
    with pytest.raises(UserError, match=r"train-0\.tar/0: the image is 12×10 pixels, but .* 1×1"):
        read_all(tmp_path)


@pytest.mark.parametrize("content", [members("222000"), renamed(members("012012"))], ids=["labels", "names"])
def test_a_shard_that_is_replaced_during_a_run_is_found(content: dict[str, bytes], tmp_path: Path) -> None:
    write_shard(tmp_path, members("012012"))
    source = open_shards(tmp_path)
    assert source.read(4)["label"] == 1
    write_shard(tmp_path, content)
    with pytest.raises(UserError, match=CHANGED):
        source.read(4)


def test_a_shard_that_is_replaced_while_it_is_indexed_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def replaced(reader: Reader, file: Any) -> Any:
        index = scan(reader, file)
        write_shard(tmp_path, members("222000"), 10**9 + 7)
        return index

    write_shard(tmp_path, members("012012"))
    write_tar(tmp_path / "test-0.tar", members("012012"))
    monkeypatch.setattr(catalog, "scan", replaced)
    with pytest.raises(UserError, match=r"train-0\.tar: its size, .* changed while it was read; run the same"):
        open_shards(tmp_path)
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user-cache"))
    assert read_all(tmp_path) == [2, 2, 2, 0, 0, 0]
