"""The source `shards` reads tar files from other programs, with the same batches as from a folder of files."""

from __future__ import annotations

import shutil
import subprocess
import tarfile
from pathlib import Path

import numpy as np
import pytest
from made_data import (
    encode_png,
    random_images,
    write_folder,
    write_pairs,
    write_panels,
    write_photos,
    write_tar,
)

from paceline.commands.pack import pack_to_shards
from paceline.config.resolve import settings_of
from paceline.core import registry
from paceline.core.errors import UserError
from paceline.data.source import Source
from paceline.data.sources.shards import Shards
from paceline.data.stream import Shuffle, tickets

pytestmark = pytest.mark.usefixtures("own_cache")
IMAGES = [encode_png(image) for image in random_images(6, 10, 12, 3)]
LABELLED = {
    f"{n:03d}{end}": data
    for n, image in enumerate(IMAGES)
    for end, data in ((".png", image), (".cls", b"%d" % (n % 3)))
}


def open_shards(root: Path | str, split: str = "train", **settings: object) -> Shards:
    return Shards(split, Shards.Settings(data="shards", data_root=str(root), workers=0, **settings))  # type: ignore[arg-type]


def open_other(name: str, root: Path | None = None, split: str = "train", **settings: object) -> Source:
    place = {"data_root": str(root)} if root else {}
    chosen = settings_of(name)(data=name, workers=0, **place, **settings)  # type: ignore[arg-type]
    return registry.load_class("source", name, Source)(split, chosen)


def assert_same_samples(one: Source, other: Source) -> None:
    assert len(one) == len(other) and one.spec == other.spec
    for index in range(len(one)):
        first, second = one.read(index), other.read(index)
        assert first.keys() == second.keys()
        assert all(np.array_equal(first[field], second[field]) for field in first)


def test_long_and_uppercase_names_in_every_tar_format_are_read(tmp_path: Path) -> None:
    folder = "a-long-folder-name/" * 6
    for kind in (tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT):
        write_tar(tmp_path / "0.TAR", {f"{folder}{name.upper()}": data for name, data in LABELLED.items()}, kind)
        train, test = open_shards(tmp_path), open_shards(tmp_path, "test")
        assert (len(train), len(test), train.spec.num_classes) == (5, 1, 3)
        assert train.name_of(0).startswith(f"0.TAR/{folder}")


def test_tar_files_written_by_gnu_tar_are_read(tmp_path: Path) -> None:
    """Besides files, `tar` stores folders and hard links. Appending to a tar file can repeat a name."""
    if "GNU" not in subprocess.run(["tar", "--version"], capture_output=True, text=True).stdout:
        pytest.skip("needs GNU tar")
    for name, content in LABELLED.items():
        (tmp_path / "files" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "files" / name).write_bytes(content)
    (tmp_path / "shards").mkdir()
    (tmp_path / "files" / "006.png").hardlink_to(tmp_path / "files" / "000.png")
    (tmp_path / "files" / "006.cls").write_text("1\n")
    subprocess.run("tar -cf shards/0.tar files/*.png files/*.cls files/", shell=True, cwd=tmp_path, check=True)
    whole = str(tmp_path / "shards")
    source = open_shards(whole, test_root=whole)
    assert [source.read(n)["label"] for n in range(7)] == [0, 1, 2, 0, 1, 2, 1]
    assert np.array_equal(source.read(6)["image"], source.read(0)["image"])
    subprocess.run("tar -rf shards/0.tar files/003.png", shell=True, cwd=tmp_path, check=True)
    with pytest.raises(UserError, match=r"0\.tar/files/003: 003\.png: one of several members for 'image'"):
        open_shards(whole)


def test_a_shard_written_by_the_webdataset_package_is_read(tmp_path: Path) -> None:
    webdataset = pytest.importorskip("webdataset")
    with webdataset.ShardWriter(str(tmp_path / "train-%03d.tar"), maxcount=4, verbose=0) as writer:
        for number, image in enumerate(IMAGES):
            writer.write({"__key__": f"{number:04d}", "png": image, "cls": number, "json": {"number": number}})
    shutil.copy(tmp_path / "train-001.tar", tmp_path / "val-000.tar")
    train, test = open_shards(tmp_path), open_shards(tmp_path, "test")
    assert [int(train.read(n)["label"]) for n in range(len(train))] == [0, 1, 2, 3, 4, 5] and len(test) == 2
    assert any(".json (6)" in note for note in train.notes)


WRITERS = {
    "folder": (write_folder, {"size": 8}),
    "photos": (write_photos, {"crop": 8}),
    "pairs": (write_pairs, {}),
    "panels": (write_panels, {"panels": "image,target"}),
}


@pytest.mark.parametrize("name", WRITERS)
def test_packed_shards_have_the_same_samples_as_their_source(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write, settings = WRITERS[name]
    origin, shards = tmp_path / "origin", tmp_path / "shards"
    origin.mkdir()
    write(origin, monkeypatch)
    flags = {"data": name, "workers": 0}
    panels = {key: value for key, value in settings.items() if key == "panels"}
    assert pack_to_shards(str(origin), str(shards), flags, panels, 1) == 0
    for split in ("train", "test"):
        assert_same_samples(open_shards(shards, split, **settings), open_other(name, origin, split, **settings))
    assert pack_to_shards(str(origin), str(shards), flags, panels, 1) == 0
    assert "already complete" in capsys.readouterr().out


def test_digits_are_packed_into_shards_and_packing_resumes_after_the_last_complete_shard(tmp_path: Path) -> None:
    shards = tmp_path / "shards"
    assert pack_to_shards("digits", str(shards), {"workers": 0}, {}, 1) == 0
    found, digits = open_shards(shards, channels=1), open_other("digits")
    assert len(list(shards.glob("train-*.tar"))) == 4
    assert found.spec == digits.spec and not found.spec.flip_allowed
    assert np.array_equal(found.read_many(np.arange(50))["image"], digits.read_many(np.arange(50))["image"])
    expected = {file.name: file.read_bytes() for file in shards.iterdir()}
    before = (shards / "train-000000.tar").stat().st_mtime_ns
    (shards / "shards.json").unlink()
    (shards / "shards_origin.json").rename(shards / "packing.json")
    (shards / "train-000001.tar.index.json").unlink()
    (shards / "train-000001.tar").write_bytes(b"half")
    assert pack_to_shards("digits", str(shards), {"workers": 0}, {}, 1) == 0
    assert {file.name: file.read_bytes() for file in shards.iterdir()} == expected
    assert (shards / "train-000000.tar").stat().st_mtime_ns == before
    with (shards / "train-000001.tar").open("r+b") as file:
        file.seek(1000)
        file.write(b"x")
    with pytest.raises(UserError, match=r"train-000001\.tar: does not match its index"):
        pack_to_shards("digits", str(shards), {"workers": 0}, {}, 1)


def test_separate_panels_are_named_by_their_members(tmp_path: Path) -> None:
    kinds = ("image", "dab", "segmentation")
    write_tar(tmp_path / "0.tar", {f"{n}.{kind}.png": IMAGES[n] for n in range(4) for kind in kinds})
    source = open_shards(tmp_path)
    assert source.spec.panels == ("dab", "segmentation") and source.read(0).keys() == set(kinds)
    assert open_shards(tmp_path, panels="image,dab").spec.panels == ("dab",)
    with pytest.raises(UserError, match="no panel 'stain'; the shards have image, dab, segmentation"):
        open_shards(tmp_path, panels="image,stain")


def test_low_resolution_members_set_the_scale(tmp_path: Path) -> None:
    high, low = random_images(4, 21, 24, 3), random_images(4, 5, 6, 3)
    members = {}
    for n in range(4):
        members |= {f"{n}.png": encode_png(high[n]), f"{n}.low.png": encode_png(low[n])}
    write_tar(tmp_path / "0.tar", members)
    source = open_shards(tmp_path, crop=8)
    assert source.spec.scale == 4 and source.read(0)["image"].shape == (20, 24, 3)


def test_groups_are_found_in_the_names_of_members(tmp_path: Path) -> None:
    write_tar(tmp_path / "0.tar", {f"scene{n // 2}-{n}.png": IMAGES[n % 6] for n in range(40)})
    train, test = (open_shards(tmp_path, split, group_by="scene[0-9]+") for split in ("train", "test"))
    assert len(train) + len(test) == 40 and not set(train.groups) & set(test.groups)


def test_braces_select_shards_and_names_select_splits(tmp_path: Path) -> None:
    for number in range(12):
        write_tar(tmp_path / f"set-{number:02d}.tar", LABELLED)
    assert len(open_shards(f"{tmp_path}/set-{{02..04}}.tar", test_root=str(tmp_path / "set-00.tar"))) == 18
    assert len(open_shards(f"{tmp_path}/set-{{02,05}}.tar", test_root=str(tmp_path / "set-00.tar"))) == 12
    with pytest.raises(UserError, match=r"set-12\.tar: no such file"):
        open_shards(f"{tmp_path}/set-{{10..12}}.tar")
    with pytest.raises(UserError, match="invalid braces"):
        open_shards(f"{tmp_path}/set-{{10...12}}.tar")


def test_packed_shards_are_read_by_list_and_packing_again_reports_a_missing_one(tmp_path: Path) -> None:
    write_folder(tmp_path / "files", pytest.MonkeyPatch())
    shards, kept = tmp_path / "shards", tmp_path / "user-cache" / "paceline" / "shards" / "index"
    pack = (str(tmp_path / "files"), str(shards), {"data": "folder", "workers": 0}, {}, 1)
    assert pack_to_shards(*pack) == 0
    assert len(open_shards(f"{shards}/train-{{000000..000000}}.tar")) > 0 and not list(kept.iterdir())
    for file in shards.glob("test-000000.tar*"):
        file.unlink()
    with pytest.raises(UserError, match=r"test-000000\.tar: is missing; restore it"):
        pack_to_shards(*pack)


def test_class_names_are_read_and_checked(tmp_path: Path) -> None:
    write_tar(tmp_path / "0.tar", LABELLED)
    (tmp_path / "classnames.txt").write_text("cat\ndog\nowl\n")
    assert open_shards(tmp_path).spec.class_names == ("cat", "dog", "owl")
    (tmp_path / "classnames.txt").write_text("cat\ndog\n")
    with pytest.raises(UserError, match="class number 2, but there are only 2 class names"):
        open_shards(tmp_path)


def test_block_shuffling_keeps_blocks_together_and_visits_every_sample_once() -> None:
    assert sorted(tickets(5, 0, 1003, Shuffle(block=10, mixed=4)).index) == list(range(1003))
    order = tickets(5, 0, 1000, Shuffle(block=10, mixed=4)).index
    for start in range(0, 1000, 40):
        assert len({int(index) // 10 for index in order[start : start + 40]}) == 4
    assert not np.array_equal(order, tickets(5, 1, 1000, Shuffle(10, 4)).index)
    assert not np.array_equal(order[:40], np.sort(order[:40]))
