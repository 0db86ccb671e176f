"""Running `paceline pack` a second time detects changes and resumes an interrupted pack."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from made_data import random_images
from PIL import Image
from running import Running, run_fork, start_fork, wait_until

from paceline.commands.configure import configure
from paceline.commands.pack import pack
from paceline.config.settings import RunSettings
from paceline.core.errors import UserError
from paceline.core.files import LOCK, WRITING, Lock, write_file
from paceline.data import packed as packing
from paceline.data.open_sources import open_sources
from paceline.data.packed import describe
from paceline.data.sources.packed import Packed
from paceline.data.sources.photos import Photos
from paceline.data.worker_pool import _print_unless_orphaned

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


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    root = tmp_path / "photos"
    for split, count in (("train", COUNT), ("test", 2)):
        (root / split).mkdir(parents=True)
        for number, image in enumerate(random_images(count, 9, 8, 3)):
            Image.fromarray(image).save(root / split / f"{number:02}.png")
    return root


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """A source in a user file. Changes to its samples can be found only by reading them."""
    (tmp_path / "texts").mkdir()
    for number in range(COUNT):
        (tmp_path / "texts" / f"{number}.txt").write_text(str(number))
    (tmp_path / "own.py").write_text(OWN)
    return tmp_path / "texts"


def rejected(match: str) -> pytest.RaisesExc[UserError]:
    return pytest.raises(
        UserError, match=rf"the source has changed since then \({match}\); delete .*packed and pack again"
    )


def replace(file: Path) -> None:
    """Replace a file with a different image of the same size."""
    size = file.stat().st_size
    Image.fromarray(255 - np.asarray(Image.open(file))).save(file)
    os.truncate(file, max(size, file.stat().st_size))


def test_changed_labels_are_detected(tmp_path: Path) -> None:
    arrays = {"x_train": random_images(12, 4, 4, 3), "x_test": random_images(2, 4, 4, 3)}
    labels = np.arange(12) % 3
    again = ("npz", str(tmp_path / "packed"), {"data_root": str(tmp_path / "own.npz"), "workers": 0}, {})
    np.savez(tmp_path / "own.npz", **arrays, y_train=labels, y_test=labels[:2])
    assert pack(*again) == pack(*again) == 0
    np.savez(tmp_path / "own.npz", **arrays, y_train=(labels + 1) % 3, y_test=labels[:2])
    with rejected("train: the labels differ"):
        pack(*again)


@pytest.mark.parametrize("is_finished", [True, False])
@pytest.mark.parametrize(
    ("change", "noticed"),
    [
        ("replaced", "train: the files have different names, sizes or modification times"),
        ("renamed", "train: the samples have different names"),
        ("added", "train has 41 samples instead of 40"),
    ],
)
def test_one_changed_file_among_many_is_detected(
    change: str, noticed: str, is_finished: bool, photos: Path, tmp_path: Path
) -> None:
    if is_finished:
        assert pack(str(photos), str(tmp_path / "packed"), NO_FLAGS, {}) == 0
    else:
        begun(photos, tmp_path / "packed", 20)
    file = photos / "train" / "04.png"
    if change == "replaced":
        replace(file)
    elif change == "renamed":
        file.rename(file.with_name("04a.png"))
    else:
        file.with_name("41.png").write_bytes(file.read_bytes())
    with rejected(noticed):
        pack(str(photos), str(tmp_path / "packed"), NO_FLAGS, {})


def test_a_label_changed_by_renaming_a_folder_is_detected(photos: Path, tmp_path: Path) -> None:
    for split, kind in (("train", "cat"), ("test", "dog")):
        (photos / split).rename(photos / kind)
    again = (str(photos), str(tmp_path / "packed"), NO_FLAGS | {"data": "folder"}, {})
    assert pack(*again) == pack(*again) == 0
    (photos / "cat" / "39.png").rename(photos / "dog" / "00a.png")
    with rejected(r"train: the (samples have different names|labels differ|files .*)"):
        pack(*again)


def test_a_moved_source_counts_as_unchanged_and_a_pack_works_without_its_source(photos: Path, tmp_path: Path) -> None:
    assert pack(str(photos), str(tmp_path / "packed"), NO_FLAGS, {}) == 0
    moved = photos.rename(tmp_path / "moved")
    assert pack(str(moved), str(tmp_path / "packed"), NO_FLAGS, {}) == 0
    os.utime(moved / "train" / "04.png")
    assert len(Packed("train", RunSettings(data_root=str(tmp_path / "packed")))) == COUNT


@pytest.mark.parametrize("changed", ["21", "99"])  # "21" changes only the image, "99" the label too
def test_a_source_without_file_metadata_is_read_again_to_detect_changes(
    changed: str, own: Path, tmp_path: Path
) -> None:
    again = (str(tmp_path / "own.py"), str(tmp_path / "packed"), {"data_root": str(own), "workers": 0}, {})
    assert pack(*again) == pack(*again) == 0
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
    assert pack(*again) == pack(*again) == 0
    (tmp_path / "by4").touch()
    with rejected(r"04\.png differs"):
        pack(*again)


def interrupted(folder: Path, own: Path) -> Running:
    """Interrupt packing after some samples, as Ctrl-C would."""
    (own / "hold").touch()
    running = start_fork(folder, "pack", "own.py", "packed", "--data-root", str(own), "--workers", "1")
    partial = folder / "packed" / "train" / "index.partial"
    wait_until(lambda: partial.is_file() and partial.stat().st_size >= 3 * 5 * 8, running)
    running.interrupt_group()
    assert running.wait() == 130
    (own / "hold").unlink()
    return running


def test_after_ctrl_c_packing_can_resume_unless_the_source_has_changed(
    own: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert interrupted(tmp_path, own).stderr == "paceline: interrupted; run the same command again to resume\n"
    resumes = ("own.py", "packed", {"data_root": str(own), "workers": 0}, {})
    monkeypatch.chdir(tmp_path)
    before = (own / "1.txt").read_text()
    (own / "1.txt").write_text("77")
    with rejected("sample 1 differs"):
        pack(*resumes)
    (own / "1.txt").write_text(before)
    assert pack(*resumes) == 0
    packed = Packed("train", RunSettings(data_root=str(tmp_path / "packed")))
    assert [int(packed.read(index)["image"][0, 0, 0]) for index in range(COUNT)] == list(range(COUNT))


def begun(photos: Path, folder: Path, count: int) -> dict[str, Photos]:
    """Pack part of the training split and stop, as if the process had been killed. Return the sources."""
    sources = {split: Photos(split, Photos.Settings(data_root=str(photos))) for split in ("train", "test")}
    packing.begin(folder, {split: describe(source) for split, source in sources.items()}, {"data": "photos"})

    class Killed(Exception):
        pass

    def kill(done: int) -> None:
        if done == count:
            raise Killed

    with pytest.raises(Killed):
        packing.fill(sources["train"], folder / "train", describe(sources["train"]), 0, kill)
    return sources


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


def test_a_full_disk_is_reported_in_one_line_and_the_same_command_resumes(photos: Path, tmp_path: Path) -> None:
    words = ("pack", "photos", "packed", "--workers", "0")
    stopped = run_fork(tmp_path, *words, largest_file=5000)
    assert stopped.wait() == 2
    assert (
        stopped.stderr == "paceline: packed: file too large; free up space, then run the same command again to resume\n"
    )
    again = run_fork(tmp_path, *words)
    assert again.wait() == 0 and "resuming packed" in again.stdout
    packed = Packed("train", RunSettings(data_root=str(tmp_path / "packed")))
    source = Photos("train", Photos.Settings(data_root=str(photos)))
    assert all(np.array_equal(packed.read(index)["image"], source.read(index)["image"]) for index in range(COUNT))


def test_a_folder_that_cannot_be_created_is_reported_in_one_line(photos: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"file/packed: Not a directory; choose a folder that can be created"):
        pack(str(photos), str(tmp_path / "file" / "packed"), NO_FLAGS, {})


def test_a_pack_has_the_same_splits_as_its_source(own: Path, tmp_path: Path) -> None:
    assert pack(str(tmp_path / "own.py"), str(tmp_path / "packed"), {"data_root": str(own), "workers": 0}, {}) == 0
    config = configure("dcgan", {"data": "packed", "data_root": str(tmp_path / "packed")}, assignments=["size=0"])
    assert list(open_sources(config)) == ["train"]
    again = tmp_path / "again"
    assert pack("packed", str(again), {"data_root": str(tmp_path / "packed"), "workers": 0}, {}) == 0
    assert Packed.splits_of(RunSettings(data_root=str(again))) == ("train",)


def test_a_worker_hides_errors_caused_by_a_dead_parent_and_prints_all_others(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for error in (BrokenPipeError(), ConnectionResetError(), EOFError()):
        _print_unless_orphaned(type(error), error, None)
    assert capsys.readouterr().err == ""
    _print_unless_orphaned(KeyError, KeyError("unexpected"), None)
    assert "KeyError: 'unexpected'" in capsys.readouterr().err


def test_two_processes_cannot_pack_into_the_same_folder(photos: Path, tmp_path: Path) -> None:
    packed = tmp_path / "packed"
    sources = {split: Photos(split, Photos.Settings(data_root=str(photos))) for split in ("train", "test")}
    packing.begin(packed, {split: describe(source) for split, source in sources.items()}, {"data": "photos"})
    other = Lock(packed)
    with pytest.raises(UserError, match=rf"packed: another process \({os.getpid()}\) is writing to this folder"):
        pack(str(photos), str(packed), NO_FLAGS, {})
    other.release(remove=True)
    assert pack(str(photos), str(packed), NO_FLAGS, {}) == 0
    assert not (packed / LOCK).exists()


def test_a_folder_on_a_file_system_without_locks_is_reported_in_one_line(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", fail)
    with pytest.raises(UserError, match=r"packed: cannot be locked \(No locks available\); choose a folder on another"):
        pack(str(photos), str(tmp_path / "packed"), NO_FLAGS, {})


def test_a_folder_that_is_removed_during_packing_is_reported_in_one_line(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fill(source: Photos, folder: Path, *arguments: Any) -> None:
        shutil.rmtree(folder.parent)
        packing.fill(source, folder, *arguments)

    monkeypatch.setattr("paceline.commands.pack.fill", fill)
    with pytest.raises(UserError, match=r"packed: was removed during packing; run the same command again"):
        pack(str(photos), str(tmp_path / "packed"), NO_FLAGS, {})


def test_packing_resumes_if_it_was_killed_while_it_wrote_its_first_file(photos: Path, tmp_path: Path) -> None:
    leftover = tmp_path / "packed" / f".0123456789abcdef{WRITING}"
    leftover.parent.mkdir()
    leftover.touch()
    assert pack(str(photos), str(tmp_path / "packed"), NO_FLAGS, {}) == 0
    assert not leftover.exists()


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


def test_a_pack_that_another_process_has_just_finished_is_not_changed(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed = tmp_path / "packed"

    def begin_too_late(*arguments: Any) -> bool:
        resumes = packing.begin(*arguments)
        monkeypatch.undo()
        assert pack(str(photos), str(packed), NO_FLAGS, {}) == 0
        return resumes

    monkeypatch.setattr("paceline.commands.pack.begin", begin_too_late)
    with pytest.raises(
        UserError, match="another process has just finished packing; run the same command again to check the result"
    ):
        pack(str(photos), str(packed), NO_FLAGS, {})
    assert pack(str(photos), str(packed), NO_FLAGS, {}) == 0
