"""`paceline pack` resumes where it was interrupted, and its errors name the damaged file."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import numpy as np
import pytest
from made_data import random_images
from PIL import Image
from running import start_fork, wait_until

from paceline.commands.pack import pack
from paceline.config.settings import RunSettings
from paceline.core.errors import UserError
from paceline.data.sources.digits import Digits
from paceline.data.sources.packed import Packed
from paceline.data.sources.photos import Photos
from paceline.images.rectangles import Box

NO_FLAGS = {"workers": 0}


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    root = tmp_path / "photos"
    for split in ("train", "test"):
        (root / split).mkdir(parents=True)
        for number in range(6):
            Image.fromarray(random_images(20 + number, 30, 3)).save(root / split / f"{number}.png")
    return root


def open_packed(root: Path, split: str = "train", **changes: int) -> Packed:
    return Packed(split, RunSettings(data_root=str(root), workers=0, **changes))  # type: ignore[arg-type]


def test_a_source_in_memory_is_packed_with_its_labels_and_data_spec(tmp_path: Path) -> None:
    assert pack("digits", str(tmp_path / "packed"), NO_FLAGS, {"size": 8}) == 0
    for split in ("train", "test"):
        packed, digits = open_packed(tmp_path / "packed", split), Digits(split, RunSettings(size=8))
        assert packed.spec == digits.spec and packed.sizes is None and len(packed) == len(digits)
        found, expected = (source.read_many(np.arange(len(digits))) for source in (packed, digits))
        assert found.keys() == expected.keys() and all(np.array_equal(found[name], expected[name]) for name in found)
        assert found["label"].dtype == np.int64


def test_packing_resumes_after_being_killed(photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    slow = tmp_path / "slow.py"
    slow.write_text(
        "import os, time\n"
        "from paceline.data.sources.photos import Photos\n"
        "class Slow(Photos):\n"
        "    def read(self, index):\n"
        f"        packs = os.path.exists({str(tmp_path / 'packed' / 'train' / 'index.partial')!r})\n"
        f"        while index > 4 and packs and os.path.exists({str(tmp_path / 'hold')!r}):\n"
        "            time.sleep(0.01)\n"
        "        return super().read(index)\n"
    )
    (tmp_path / "hold").touch()
    running = start_fork(tmp_path, "pack", str(slow), "packed", "--data-root", str(photos), "--workers", "0")
    partial = tmp_path / "packed" / "train" / "index.partial"
    wait_until(lambda: partial.is_file() and partial.stat().st_size >= 3 * 4 * 8, running)
    running.kill()
    assert running.wait() == -signal.SIGKILL
    (tmp_path / "hold").unlink()
    with pytest.raises(UserError, match="packing was not finished"):
        open_packed(tmp_path / "packed")
    with open(tmp_path / "packed" / "train" / "image.pixels", "ab") as pixels:
        pixels.write(b"half an image")
    with open(partial, "ab") as rows:
        rows.write(b"half a row")
    with pytest.raises(
        UserError,
        match=r"a different source, .* \(train has 1,438 samples instead of 6\)",
    ):
        pack("digits", str(tmp_path / "packed"), NO_FLAGS, {})
    assert pack(str(slow), str(tmp_path / "packed"), {"data_root": str(photos), "workers": 0}, {}) == 0
    assert "resuming " in capsys.readouterr().out
    packed, source = open_packed(tmp_path / "packed"), Photos("train", Photos.Settings(data_root=str(photos)))
    for index in range(len(source)):
        assert np.array_equal(packed.read(index)["image"], source.read(index)["image"])


@pytest.fixture
def packed(photos: Path, tmp_path: Path) -> Path:
    assert pack(str(photos), str(tmp_path / "packed"), NO_FLAGS, {}) == 0
    return tmp_path / "packed"


def test_packing_again_checks_every_pixel(packed: Path, photos: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert pack(str(photos), str(packed), NO_FLAGS, {}) == 0
    assert "all checksums match" in capsys.readouterr().out
    flip_a_bit(packed / "test" / "image.pixels", -1)
    with pytest.raises(UserError, match=r"test/image\.pixels: 5\.png is damaged"):
        pack(str(photos), str(packed), NO_FLAGS, {})
    with pytest.raises(UserError, match=r"instead of 6\); delete .*packed and pack again, or choose"):
        pack("digits", str(packed), NO_FLAGS, {})


def flip_a_bit(file: Path, place: int) -> None:
    content = bytearray(file.read_bytes())
    content[place] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize("by_window", [False, True])
def test_a_damaged_image_is_reported_and_the_others_are_read(by_window: bool, packed: Path) -> None:
    flip_a_bit(packed / "train" / "image.pixels", 5)
    source = open_packed(packed)
    read = (lambda index: source.read_window(index, Box(10, 10, 4, 4))) if by_window else source.read
    read(1)
    with pytest.raises(UserError, match=r"train/image\.pixels: 0\.png is damaged"):
        read(0)


def test_truncated_missing_and_changed_files_are_rejected(packed: Path) -> None:
    pixels, index, names = (packed / "train" / name for name in ("image.pixels", "index.npy", "names.json"))
    whole = pixels.read_bytes()
    pixels.write_bytes(whole[:-1])
    with pytest.raises(UserError, match=r"image\.pixels: has 12,149 bytes instead of 12,150; delete .*packed and pack"):
        open_packed(packed)
    pixels.write_bytes(whole)
    for file in (index, names):
        flip_a_bit(file, -2)
        with pytest.raises(UserError, match=rf"{file.name}: damaged"):
            open_packed(packed)
        flip_a_bit(file, -2)
    assert len(open_packed(packed)) == 6
    index.unlink()
    with pytest.raises(UserError, match=r"index\.npy: missing"):
        open_packed(packed)


def test_other_format_versions_and_unrelated_folders_are_rejected(packed: Path, photos: Path) -> None:
    manifest = json.loads((packed / "pack.json").read_text())
    (packed / "pack.json").write_text(json.dumps(manifest | {"version": 1}))
    for read in (lambda: open_packed(packed), lambda: pack(str(photos), str(packed), NO_FLAGS, {})):
        with pytest.raises(UserError, match=r"format version 1, expected 3; delete .*packed and pack again"):
            read()
    (packed / "pack.json").write_text('{"format": ')
    with pytest.raises(UserError, match=r"pack\.json: damaged"):
        open_packed(packed)
    (packed / "pack.json").write_text("{}")
    with pytest.raises(UserError, match="not written by `paceline pack`"):
        open_packed(packed)
    with pytest.raises(UserError, match=r"not a packed folder \(it has no pack\.json\)"):
        open_packed(photos)
    with pytest.raises(UserError, match="choose a new or empty folder"):
        pack(str(photos), str(photos), NO_FLAGS, {})


@pytest.mark.parametrize("change", ["a wrong count", "other channels", "a missing key", "no checksum"])
def test_the_metadata_of_a_pack_is_checked_against_its_checksum(change: str, packed: Path, photos: Path) -> None:
    manifest = json.loads((packed / "pack.json").read_text())
    split = manifest["splits"]["train"]
    if change == "a wrong count":
        split["count"] -= 1
    elif change == "other channels":
        split["spec"]["channels"] = split["images"]["image"] = 1
    elif change == "a missing key":
        del split["mixed"]
    else:
        del manifest["sha256"]
    (packed / "pack.json").write_text(json.dumps(manifest))
    for read in (lambda: open_packed(packed, "test"), lambda: pack(str(photos), str(packed), NO_FLAGS, {})):
        with pytest.raises(UserError, match=r"pack\.json: damaged .*; delete .*packed and pack again$"):
            read()


def test_settings_fixed_by_packing_cannot_be_changed_later(packed: Path) -> None:
    with pytest.raises(
        UserError, match=r"channels=1: .* was packed with channels=3; to change this, pack the original"
    ):
        open_packed(packed, channels=1)
    with pytest.raises(UserError, match=r"size=7: .* was packed with 30×20 pixels"):
        open_packed(packed, size=7)
    with pytest.raises(UserError, match="has no split 'validation'; available: train, test"):
        open_packed(packed, "validation")


def test_the_source_to_pack_must_exist_and_be_given_only_once(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="pack nowhere: no such folder or source"):
        pack("nowhere", str(tmp_path / "packed"), NO_FLAGS, {})
    with pytest.raises(UserError, match="--data degraded: photos is the name of a different source"):
        pack("photos", str(tmp_path / "packed"), NO_FLAGS | {"data": "degraded"}, {})
    (tmp_path / "one").mkdir()
    with pytest.raises(UserError, match=r"--data-root other: .*one is packed; leave one of the two out"):
        pack(str(tmp_path / "one"), str(tmp_path / "packed"), NO_FLAGS | {"data_root": "other"}, {})


def test_an_npz_file_is_packed_by_its_path_or_by_the_name_of_its_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    np.savez(tmp_path / "own.npz", x_train=random_images(6, 8, 8, 3), y_train=np.arange(6) % 2)
    (tmp_path / "npz").mkdir()  # the name of a source is not taken for this folder if there is a --data-root
    monkeypatch.chdir(tmp_path)
    for origin, flags in (("own.npz", {}), ("own.npz", {"data": "npz"}), ("npz", {"data_root": "own.npz"})):
        assert pack(origin, f"packed{len(flags)}{origin}", NO_FLAGS | flags, {}) == 0
        packed = open_packed(tmp_path / f"packed{len(flags)}{origin}")
        assert len(packed) == 6 and packed.spec.num_classes == 2


def test_a_pack_that_does_not_fit_on_the_disk_is_rejected(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 100})())
    with pytest.raises(UserError, match="pack: needs"):
        pack(str(photos), str(tmp_path / "packed"), NO_FLAGS, {})
