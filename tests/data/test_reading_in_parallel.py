"""All samples are read once at the start, by several processes: equal pixels, bounded memory, errors with names."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from paceline.config.settings import RunSettings
from paceline.config.source_flags import PhotoSettings
from paceline.core.errors import UserError
from paceline.data import whole_source
from paceline.data.bundled import FOLDER
from paceline.data.pixels import Pixels
from paceline.data.sources.photos import Photos
from paceline.data.whole_source import MAX_READERS, num_readers, read_in_order

CPU = torch.device("cpu")


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


def test_a_file_that_is_damaged_after_the_headers_were_read_is_named(photos: Path) -> None:
    source = open_photos(photos)
    damaged = photos / "moon.png"
    content = damaged.read_bytes()
    damaged.write_bytes(content[: len(content) // 2])
    with pytest.raises(UserError, match=r"moon\.png"):
        Pixels(source, CPU, 3)


def test_ctrl_c_while_all_samples_are_read_ends_the_run_and_its_processes(tmp_path: Path) -> None:
    for number in range(3):
        noise = np.random.default_rng(number).integers(256, size=(64, 64, 3), dtype=np.uint8)
        Image.fromarray(noise).save(tmp_path / f"{number}.png")
    slow = tmp_path / "slow.py"
    slow.write_text(
        "import os, time\n"
        "from paceline.data.sources.photos import Photos\n\n\n"
        "class Slow(Photos):\n"
        "    def read_many(self, indices):\n"
        f"        open(r'{tmp_path}/pid-' + str(os.getpid()), 'w').close()\n"
        "        time.sleep(60)\n"
        "        return super().read_many(indices)\n"
    )
    words = ["train", "super_resolution", "--preset", "quick", "--data", str(slow), "--data-root", str(tmp_path)]
    words += [
        "--crop",
        "32",
        "--accelerator",
        "cpu",
        "--workers",
        "2",
        "--loader",
        "resident",
        "--out",
        str(tmp_path / "r"),
    ]
    command = [sys.executable, "-m", "paceline", *words]
    running = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        until = time.monotonic() + 60
        while len(pids := [int(file.name.partition("-")[2]) for file in tmp_path.glob("pid-*")]) < 2:
            assert time.monotonic() < until and running.poll() is None, "the processes that read have not started"
            time.sleep(0.05)
        os.killpg(running.pid, signal.SIGINT)
        assert running.wait(30) == 130
    finally:
        running.kill()
        running.communicate()
    until = time.monotonic() + 10
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < until, "a process that reads is still running"
        time.sleep(0.05)
