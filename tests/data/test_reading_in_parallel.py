"""All samples are read once at the start, by several processes: equal pixels, bounded memory, errors with names."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from PIL import Image
from running import has_ended, start_fork, wait_until

from paceline.config.flags import PhotoSettings
from paceline.config.settings import RunSettings
from paceline.core.errors import UserError
from paceline.data import whole_source
from paceline.data.bundled import FOLDER
from paceline.data.source import Source
from paceline.data.sources.photos import Photos
from paceline.data.whole_source import MAX_READERS, Pixels, num_readers, read_in_order
from paceline.data.worker_pool import WorkerPool

CPU = torch.device("cpu")
# torch warns if there are more processes than cores.
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


@pytest.mark.parametrize(
    ("cores", "workers", "devices", "expected"),
    [(16, 2, 1, 16), (16, 2, 4, 4), (2, 8, 1, 8), (64, 2, 1, MAX_READERS), (2, 2, 8, 2), (16, 0, 1, 0)],
)
def test_a_process_reads_with_its_share_of_the_cores_but_with_workers_0_in_itself(
    monkeypatch: pytest.MonkeyPatch, cores: int, workers: int, devices: int, expected: int
) -> None:
    monkeypatch.setattr(whole_source, "num_cores", lambda: cores)
    assert num_readers(RunSettings(workers=workers, devices=devices)) == expected


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """A folder with photographs of several formats and sizes, which other programs have written."""
    for name in ("astronaut.webp", "coins.png", "retina.jpg", "moon.png", "rocket.jpg", "brick.png"):
        with Image.open(FOLDER / name) as image:
            image.crop((0, 0, 120, 90 + len(name))).save(tmp_path / name)
    return tmp_path


def open_photos(folder: Path) -> Photos:
    return Photos("test", PhotoSettings(test_root=str(folder), workers=1))


def test_pixels_do_not_depend_on_the_number_of_processes_that_read_them(photos: Path) -> None:
    source = open_photos(photos)
    alone, together = Pixels(source, CPU, 0), Pixels(source, CPU, 3)
    assert len(source) == 6 and alone.samples.keys() == together.samples.keys()
    assert all(torch.equal(alone.samples[name], together.samples[name]) for name in alone.samples)


def test_many_processes_read_smaller_pieces_so_that_memory_stays_bounded(
    photos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for file in photos.glob("*"):
        with Image.open(file) as image:
            image.resize((32, 32)).save(file)
    source = open_photos(photos)  # 3,072 bytes per image
    monkeypatch.setattr(whole_source, "BYTES_WAITING", 4 * 2 * 3072)
    sizes = {
        workers: [len(piece["index"]) for piece in read_in_order(source, workers, 2**20)] for workers in (0, 1, 2, 4)
    }
    assert sizes == {0: [6], 1: [4, 2], 2: [2, 2, 2], 4: [1] * 6}


def test_large_samples_are_read_by_fewer_processes(photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[int] = []

    class Counted(WorkerPool):
        def __init__(self, source: Source, num_workers: int) -> None:
            used.append(num_workers)
            super().__init__(source, num_workers)

    source = open_photos(photos)
    assert source.sizes is not None
    largest = int(source.sizes.prod(axis=1).max()) * 3
    monkeypatch.setattr(whole_source, "WorkerPool", Counted)
    for room in (2 * 2 * largest + 1000, largest):
        monkeypatch.setattr(whole_source, "LARGE_BYTES_WAITING", room)
        assert sum(len(piece["index"]) for piece in read_in_order(source, 4, 2**20)) == 6
    assert used == [2, 1]


def test_a_file_that_is_damaged_after_the_headers_were_read_is_named(photos: Path) -> None:
    source = open_photos(photos)
    damaged = photos / "moon.png"
    content = damaged.read_bytes()
    damaged.write_bytes(content[: len(content) // 2])
    with pytest.raises(UserError, match=r"moon\.png"):
        Pixels(source, CPU, 3)


SLOW = """
import os
import time

import numpy as np

from paceline import DataSpec, Source


class Slow(Source):
    spec = DataSpec(1, 8, 8, num_classes=10)

    def __init__(self, split, settings):
        pass

    def __len__(self):
        return 200

    def read(self, index):
        return {"image": np.zeros((8, 8, 1), np.uint8), "label": np.int64(index % 10)}

    def read_many(self, indices):
        open(f"reads-{os.getpid()}", "w").close()
        time.sleep(60)  # much longer than the test takes
"""


def test_ctrl_c_while_all_samples_are_read_ends_the_run_and_its_processes(tmp_path: Path, tiny: str) -> None:
    (tmp_path / "slow.py").write_text(SLOW)
    words = ("--data", "./slow.py", "--accelerator", "cpu", "--workers", "2", "--loader", "resident", "--out", "run")
    running = start_fork(tmp_path, "train", tiny, *words)
    (file,) = wait_until(lambda: list(tmp_path.glob("reads-*")), running)  # the samples fit in one piece
    reader = int(file.name.partition("-")[2])
    assert reader != running.pid
    running.interrupt_group()
    assert running.wait() == 130
    wait_until(lambda: has_ended(reader))
