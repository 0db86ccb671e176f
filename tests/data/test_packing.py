"""`paceline pack` resumes where it was interrupted, detects changes, and its errors name the damaged file."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hostile_packs import DAMAGES, GOOD, Pack
from made_data import random_images
from PIL import Image
from running import run_fork, start_fork, wait_until

from paceline.commands.configure import configure
from paceline.commands.pack import pack
from paceline.config.settings import RunSettings
from paceline.core.errors import UserError
from paceline.core.files import LOCK, WRITING, Lock, write_file
from paceline.data import packing
from paceline.data.packing import describe
from paceline.data.source import check_split, open_sources
from paceline.data.sources.digits import Digits
from paceline.data.sources.packed import Packed
from paceline.data.sources.photos import Photos
from paceline.images.rectangles import Box

COUNT = 40  # more samples than a spot check of 16 would cover
NO_FLAGS = {"workers": 0}
OWN = """
import time
from pathlib import Path
import numpy as np
from paceline.data.source import Source
from paceline.contracts.recipe import DataSpec

class Own(Source):
    splits = ("train",)

    def __init__(self, split, settings):
        self.root, self.spec = Path(settings.data_root), DataSpec(1, 4, 4, 10)
        self.sizes = np.array([(4 + index % 2, 4) for index in range(40)])

    def __len__(self):
        return 40

    def read(self, index):
        packs = (self.root.parent / "packed" / "train" / "index.partial").exists()
        while index >= 20 and packs and (self.root / "hold").exists():
            time.sleep(0.01)
        level = int((self.root / f"{index}.txt").read_text())
        return {"image": np.full((*self.sizes[index], 1), level, dtype=np.uint8), "label": np.array(int(level == 99))}
"""
SLOW = """
import os, time
from paceline.data.sources.photos import Photos

class Slow(Photos):
    def read(self, index):
        while index > 4 and os.path.exists("packed/train/index.partial") and os.path.exists("hold"):
            time.sleep(0.01)
        return super().read(index)

    def files_of(self, index):
        return super().files_of(index)
"""


def write_photos(root: Path, count: int = COUNT) -> Path:
    for split, number in (("train", count), ("test", 2)):
        (root / split).mkdir(parents=True)
        for index, image in enumerate(random_images(number, 9, 8, 3)):
            Image.fromarray(image[: 9 - index % 2]).save(root / split / f"{index:02}.png")
    return root


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    return write_photos(tmp_path / "photos")


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """A source in a user file. Changes to its samples can be found only by reading them."""
    (tmp_path / "texts").mkdir()
    for number in range(COUNT):
        (tmp_path / "texts" / f"{number}.txt").write_text(str(number))
    (tmp_path / "own.py").write_text(OWN)
    return tmp_path / "texts"


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with photos and a finished pack of them."""
    root = tmp_path_factory.mktemp("finished")
    assert pack(str(write_photos(root / "photos", 6)), str(root / "packed"), NO_FLAGS, {}) == 0
    return root


@pytest.fixture
def packed(finished: Path, tmp_path: Path) -> Path:
    """A copy of the finished pack."""
    return Path(shutil.copytree(finished / "packed", tmp_path / "packed"))


def open_packed(root: Path, split: str = "train", **changes: int) -> Packed:
    return Packed(split, RunSettings(data_root=str(root), workers=0, **changes))  # type: ignore[arg-type]


def open_photos(root: Path) -> dict[str, Photos]:
    return {split: Photos(split, Photos.Settings(data_root=str(root))) for split in ("train", "test")}


def assert_same_images(packed: Path, photos: Path) -> None:
    one, other = open_packed(packed), open_photos(photos)["train"]
    assert len(one) == len(other)
    assert all(np.array_equal(one.read(index)["image"], other.read(index)["image"]) for index in range(len(one)))


def rejected(match: str) -> pytest.RaisesExc[UserError]:
    return pytest.raises(
        UserError, match=rf"the source has changed since then \({match}\); delete .*packed and pack again"
    )


def replace(file: Path) -> None:
    """Replace a file with a different image of the same size."""
    size = file.stat().st_size
    Image.fromarray(255 - np.asarray(Image.open(file))).save(file)
    os.truncate(file, max(size, file.stat().st_size))


def flip_a_bit(file: Path, place: int) -> None:
    content = bytearray(file.read_bytes())
    content[place] ^= 1
    file.write_bytes(content)


def begun(photos: Path, folder: Path, count: int) -> dict[str, Photos]:
    """Pack part of the training split and stop, as if the process had been killed. Return the sources."""
    sources = open_photos(photos)
    packing.begin(folder, {split: describe(source) for split, source in sources.items()}, {"data": "photos"})

    class Killed(Exception):
        pass

    def kill(done: int) -> None:
        if done == count:
            raise Killed

    with pytest.raises(Killed):
        packing.fill(sources["train"], folder / "train", describe(sources["train"]), 0, kill)
    return sources


# What a pack contains


def test_a_source_in_memory_is_packed_with_its_labels_and_data_spec(tmp_path: Path) -> None:
    assert pack("digits", str(tmp_path / "packed"), NO_FLAGS, {"size": 8}) == 0
    for split in ("train", "test"):
        packed, digits = open_packed(tmp_path / "packed", split), Digits(split, RunSettings(size=8))
        assert packed.spec == digits.spec and packed.sizes is None and len(packed) == len(digits)
        found, expected = (source.read_many(np.arange(len(digits))) for source in (packed, digits))
        assert found.keys() == expected.keys() and all(np.array_equal(found[name], expected[name]) for name in found)
        assert found["label"].dtype == np.int64


def test_a_pack_has_the_same_splits_as_its_source(own: Path, tmp_path: Path) -> None:
    assert pack(str(tmp_path / "own.py"), str(tmp_path / "packed"), {"data_root": str(own), "workers": 0}, {}) == 0
    config = configure("dcgan", {"data": "packed", "data_root": str(tmp_path / "packed")}, assignments=["size=0"])
    assert list(open_sources(config)) == ["train"]
    again = tmp_path / "again"
    assert pack("packed", str(again), {"data_root": str(tmp_path / "packed"), "workers": 0}, {}) == 0
    assert Packed.splits_of(RunSettings(data_root=str(again))) == ("train",)


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


# Packing again


def test_packing_again_checks_every_pixel(
    packed: Path, finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    photos = Path(shutil.copytree(finished / "photos", tmp_path / "photos"))  # a moved source counts as unchanged
    assert pack(str(photos), str(packed), NO_FLAGS, {}) == 0
    assert "all checksums match" in capsys.readouterr().out
    flip_a_bit(packed / "test" / "image.pixels", -1)
    with pytest.raises(UserError, match=r"test/image\.pixels: 01\.png is damaged"):
        pack(str(photos), str(packed), NO_FLAGS, {})
    with pytest.raises(UserError, match=r"instead of 6\); delete .*packed and pack again, or choose"):
        pack("digits", str(packed), NO_FLAGS, {})


@pytest.mark.parametrize("is_finished", [True, False])
def test_one_changed_file_among_many_is_detected(is_finished: bool, photos: Path, tmp_path: Path) -> None:
    if is_finished:
        assert pack(str(photos), str(tmp_path / "packed"), NO_FLAGS, {}) == 0
    else:
        begun(photos, tmp_path / "packed", 20)
    file = photos / "train" / "04.png"
    replace(file)
    with rejected("train: the names, sizes or modification times of the files differ"):
        pack(str(photos), str(tmp_path / "packed"), NO_FLAGS, {})
    file.rename(file.with_name("04a.png"))
    with rejected("train: the names of the samples differ"):
        pack(str(photos), str(tmp_path / "packed"), NO_FLAGS, {})
    shutil.copy(file.with_name("04a.png"), file)
    with rejected("train has 41 samples instead of 40"):
        pack(str(photos), str(tmp_path / "packed"), NO_FLAGS, {})


def test_changed_labels_are_detected(tmp_path: Path) -> None:
    arrays = {"x_train": random_images(12, 4, 4, 3), "x_test": random_images(2, 4, 4, 3)}
    labels = np.arange(12) % 3
    again = ("npz", str(tmp_path / "packed"), {"data_root": str(tmp_path / "own.npz"), "workers": 0}, {})
    np.savez(tmp_path / "own.npz", **arrays, y_train=labels, y_test=labels[:2])
    assert pack(*again) == pack(*again) == 0
    np.savez(tmp_path / "own.npz", **arrays, y_train=(labels + 1) % 3, y_test=labels[:2])
    with rejected("train: the labels differ"):
        pack(*again)


def test_a_source_without_file_metadata_is_read_again_to_detect_changes(own: Path, tmp_path: Path) -> None:
    again = (str(tmp_path / "own.py"), str(tmp_path / "packed"), {"data_root": str(own), "workers": 0}, {})
    assert pack(*again) == pack(*again) == 0
    for changed in ("21", "99"):  # "21" changes only the image, "99" the label too
        (own / "20.txt").write_text(changed)
        with rejected("sample 20 differs"):
            pack(*again)


def test_a_source_that_overrides_reading_does_not_use_inherited_file_metadata(photos: Path, tmp_path: Path) -> None:
    (tmp_path / "darker.py").write_text(
        "from pathlib import Path\n"
        "from paceline.data.sources.photos import Photos\n"
        "class Darker(Photos):\n"
        "    def read(self, index):\n"
        "        by = int(Path(__file__).with_name(f'by{index}').exists())\n"
        "        return {'image': super().read(index)['image'] >> by}\n"
    )
    again = (str(tmp_path / "darker.py"), str(tmp_path / "packed"), {"data_root": str(photos), "workers": 0}, {})
    assert pack(*again) == 0
    (tmp_path / "by4").touch()
    with rejected(r"04\.png differs"):
        pack(*again)


# Resuming


def test_packing_resumes_after_being_killed(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "slow.py").write_text(SLOW)
    (tmp_path / "hold").touch()
    running = start_fork(tmp_path, "pack", "slow.py", "packed", "--data-root", str(photos), "--workers", "0")
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
    with pytest.raises(UserError, match=r"a different source, .* \(train has 1,438 samples instead of 40\)"):
        pack("digits", "packed", NO_FLAGS, {})
    assert pack("slow.py", "packed", {"data_root": str(photos), "workers": 0}, {}) == 0
    assert "resuming " in capsys.readouterr().out
    assert_same_images(tmp_path / "packed", photos)


def test_after_ctrl_c_a_source_without_file_metadata_is_packed_from_the_beginning(
    own: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (own / "hold").touch()
    running = start_fork(tmp_path, "pack", "own.py", "packed", "--data-root", str(own), "--workers", "1")
    partial = tmp_path / "packed" / "train" / "index.partial"
    wait_until(lambda: partial.is_file() and partial.stat().st_size >= 3 * 5 * 8, running)
    running.interrupt_group()
    assert running.wait() == 130
    assert running.stderr == "paceline: interrupted; run the same command again to resume\n"
    (own / "hold").unlink()
    monkeypatch.chdir(tmp_path)
    (own / "1.txt").write_text("77")
    assert pack("own.py", "packed", {"data_root": str(own), "workers": 0}, {}) == 0
    packed = open_packed(tmp_path / "packed")
    levels = [int(packed.read(index)["image"][0, 0, 0]) for index in range(COUNT)]
    assert levels == [0, 77, *range(2, COUNT)]


def test_missing_pixels_are_packed_again(photos: Path, tmp_path: Path) -> None:
    begun(photos, tmp_path / "packed", 20)
    os.truncate(tmp_path / "packed" / "train" / "image.pixels", 1000)
    for _ in range(2):  # the second call checks every pixel
        assert pack(str(photos), str(tmp_path / "packed"), NO_FLAGS, {}) == 0


def test_files_that_change_while_they_are_packed_are_detected(photos: Path, tmp_path: Path) -> None:
    sources = begun(photos, tmp_path / "packed", 20)
    for split, source in sources.items():
        packing.fill(source, tmp_path / "packed" / split, describe(source), 0, lambda done: None)
    replace(photos / "train" / "04.png")
    with rejected("train: files changed during packing"):
        packing.finish(tmp_path / "packed", sources)


def test_packing_resumes_if_it_was_killed_while_it_wrote_its_first_file(photos: Path, tmp_path: Path) -> None:
    leftover = tmp_path / "packed" / f".0123456789abcdef{WRITING}"
    leftover.parent.mkdir()
    leftover.touch()
    assert pack(str(photos), str(tmp_path / "packed"), NO_FLAGS, {}) == 0
    assert not leftover.exists()


def test_a_full_disk_is_reported_in_one_line_and_the_same_command_resumes(photos: Path, tmp_path: Path) -> None:
    words = ("pack", "photos", "packed", "--workers", "0")
    stopped = run_fork(tmp_path, *words, largest_file=5000)
    assert stopped.wait() == 2
    line = "paceline: packed: file too large; free up space, then run the same command again to resume\n"
    assert stopped.stderr == line
    again = run_fork(tmp_path, *words)
    assert again.wait() == 0 and "resuming packed" in again.stdout
    assert_same_images(tmp_path / "packed", photos)


# Folders that cannot be written


def test_two_processes_cannot_pack_into_the_same_folder(photos: Path, tmp_path: Path) -> None:
    packed = tmp_path / "packed"
    splits = {split: describe(source) for split, source in open_photos(photos).items()}
    packing.begin(packed, splits, {"data": "photos"})
    other = Lock(packed)
    with pytest.raises(UserError, match=rf"packed: another process \({os.getpid()}\) is writing to this folder"):
        pack(str(photos), str(packed), NO_FLAGS, {})
    other.release(remove=True)
    assert pack(str(photos), str(packed), NO_FLAGS, {}) == 0
    assert not (packed / LOCK).exists()


def test_a_folder_that_cannot_be_written_is_reported_in_one_line(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def check(folder: str, message: str) -> None:
        with pytest.raises(UserError, match=message):
            pack(str(photos), str(tmp_path / folder), NO_FLAGS, {})
        monkeypatch.undo()

    def has_no_locks(*arguments: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    def remove_and_fill(source: Photos, folder: Path, *arguments: Any) -> None:
        shutil.rmtree(folder.parent)
        packing.fill(source, folder, *arguments)

    def begin_too_late(*arguments: Any) -> bool:
        resumes = packing.begin(*arguments)
        monkeypatch.undo()
        assert pack(str(photos), str(tmp_path / "packed"), NO_FLAGS, {}) == 0
        return resumes

    (tmp_path / "file").touch()
    check("file/packed", r"file/packed: Not a directory; choose a folder that can be created")
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 100})())
    check("packed", "pack: needs")
    monkeypatch.setattr(fcntl, "flock", has_no_locks)
    check("packed", r"packed: cannot be locked \(No locks available\); choose a folder on another")
    monkeypatch.setattr("paceline.commands.pack.fill", remove_and_fill)
    check("packed", r"packed: was removed during packing; run the same command again")
    monkeypatch.setattr("paceline.commands.pack.begin", begin_too_late)
    check("packed", "another process has just finished packing; run the same command again to check the result")
    assert pack(str(photos), str(tmp_path / "packed"), NO_FLAGS, {}) == 0


def test_a_temporary_file_that_cannot_be_closed_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(descriptor: int) -> None:  # as on NFS, where closing a file reports errors of the server
        is_written_here = os.readlink(f"/proc/self/fd/{descriptor}").startswith(str(tmp_path))
        close(descriptor)
        if is_written_here:
            raise OSError(errno.EIO, "Input/output error")

    close = os.close
    monkeypatch.setattr(os, "close", fail)
    with pytest.raises(OSError, match="Input/output error"):
        write_file(tmp_path / "file", b"content")
    assert not os.listdir(tmp_path)


# Damage


def test_a_damaged_image_is_reported_and_the_others_are_read(packed: Path) -> None:
    flip_a_bit(packed / "train" / "image.pixels", 5)
    for read in (Packed.read, lambda source, index: source.read_window(index, Box(2, 2, 4, 4))):
        source = open_packed(packed)
        read(source, 1)
        with pytest.raises(UserError, match=r"train/image\.pixels: 00\.png is damaged"):
            read(source, 0)


def edit(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    def write(root: Path) -> None:
        manifest = json.loads((root / "pack.json").read_text())
        change(manifest)
        (root / "pack.json").write_text(json.dumps(manifest))

    return write


FILE_DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "pixels cut": (
        lambda root: os.truncate(root / "train" / "image.pixels", 1000),
        r"image\.pixels: has 1,000 bytes instead of 1,224; delete .*packed and pack",
    ),
    "index changed": (lambda root: flip_a_bit(root / "train" / "index.npy", -2), r"index\.npy: damaged"),
    "names changed": (lambda root: flip_a_bit(root / "train" / "names.json", -2), r"names\.json: damaged"),
    "index missing": (lambda root: (root / "train" / "index.npy").unlink(), r"index\.npy: missing"),
    "version": (edit(lambda content: content.update(version=1)), "format version 1, expected 3; delete .*packed and"),
    "cut off": (lambda root: (root / "pack.json").write_text('{"format": '), r"pack\.json: damaged"),
    "other program": (lambda root: (root / "pack.json").write_text("{}"), "not written by `paceline pack`"),
    "count": (
        edit(lambda content: content["splits"]["train"].update(count=5)),
        r"pack\.json: damaged .*; delete .*packed and pack again$",
    ),
    "no key": (edit(lambda content: content["splits"]["train"].pop("mixed")), r"pack\.json: damaged"),
    "no checksum": (edit(lambda content: content.pop("sha256")), r"pack\.json: damaged"),
}


def test_damaged_packs_are_rejected_with_the_name_of_the_file(finished: Path, tmp_path: Path) -> None:
    for name, (damage, message) in FILE_DAMAGES.items():
        root = Path(shutil.copytree(finished / "packed", tmp_path / name / "packed"))
        damage(root)
        with pytest.raises(UserError, match=message):
            open_packed(root)
        with pytest.raises(UserError, match=message):
            pack(str(finished / "photos"), str(root), NO_FLAGS, {})


def test_arguments_that_do_not_fit_are_rejected(packed: Path, finished: Path, tmp_path: Path) -> None:
    photos, again = str(finished / "photos"), str(tmp_path / "again")
    (tmp_path / "one").mkdir()
    for call, message in (
        (lambda: open_packed(packed, channels=1), r"channels=1: .* was packed with channels=3; to change this, pack"),
        (lambda: open_packed(packed, size=7), r"size=7: .* was packed with 8×9 pixels"),
        (lambda: open_packed(packed, "validation"), "has no split 'validation'; available: train, test"),
        (lambda: open_packed(Path(photos)), r"not a packed folder \(it has no pack\.json\)"),
        (lambda: pack(photos, photos, NO_FLAGS, {}), "choose a new or empty folder"),
        (lambda: pack("nowhere", again, NO_FLAGS, {}), "pack nowhere: no such folder or source"),
        (
            lambda: pack("photos", again, NO_FLAGS | {"data": "degraded"}, {}),
            "--data degraded: photos is the name of a different source",
        ),
        (
            lambda: pack(str(tmp_path / "one"), again, NO_FLAGS | {"data_root": "other"}, {}),
            r"--data-root other: .*one is packed; leave one of the two out",
        ),
    ):
        with pytest.raises(UserError, match=message):
            call()  # type: ignore[no-untyped-call]


# Packs made by strangers, whose checksums are right


def open_checked(root: Path) -> Packed:
    settings = RunSettings(data="packed", data_root=str(root), workers=0)
    Packed.splits_of(settings)
    source = Packed("train", settings)
    check_split(source, "train", "packed")
    return source


def test_a_pack_with_right_checksums_but_wrong_content_is_rejected_in_one_line(tmp_path: Path) -> None:
    for number, (damage, change) in enumerate(DAMAGES.items()):
        pack, root = Pack(), tmp_path / str(number)
        change(pack)
        pack.write(root / "in" / "packed")
        (root / "outside.pixels").write_bytes(pack.train.pixels.get("image", b""))
        with pytest.raises(UserError, match="packed") as caught:
            source = open_checked(root / "in" / "packed")
            if damage == "another image's checksum":  # found when the image is read
                source.read_many(np.arange(len(source)))
        assert "\n" not in str(caught.value) and len(str(caught.value)) < 500 + 2 * len(str(root)), damage


def test_a_valid_pack_from_another_program_is_read(tmp_path: Path) -> None:
    for number, change in enumerate(GOOD.values()):
        pack = Pack()
        change(pack)
        pack.write(tmp_path / str(number) / "packed")
        source = open_checked(tmp_path / str(number) / "packed")
        found = source.read_many(np.arange(len(source)))
        assert np.array_equal(found["image"], pack.train.images)
        assert np.array_equal(found["label"], pack.index[:, -1])
