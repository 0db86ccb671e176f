"""If loader processes cannot share memory with a command, the command reports where and why, and never hangs."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import resource
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from running import Running, start_function_in_ranks

from paceline.config.source_flags import PhotoSettings
from paceline.core.errors import UserError
from paceline.data.sources.photos import Photos
from paceline.data.whole_source import read_in_order

FILES = resource.RLIMIT_NOFILE
CLONE_NEWNS, MS_REC, MS_PRIVATE = 0x20000, 0x4000, 1 << 18  # from <linux/sched.h> and <linux/mount.h>


def mount_tmpfs(folder: str, size: int) -> None:
    """Mount a small tmpfs on a folder, visible only to this process and its children; needs root."""
    libc = ctypes.CDLL(None, use_errno=True)
    for failed in (
        libc.unshare(CLONE_NEWNS),
        libc.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None),
        libc.mount(b"tmpfs", folder.encode(), b"tmpfs", 0, f"size={size}".encode()),
    ):
        if failed:
            raise OSError(ctypes.get_errno(), "cannot mount a tmpfs")


def use_temporary_folder(folder: str) -> None:
    os.makedirs(folder, exist_ok=True)
    os.environ["TMPDIR"] = folder
    tempfile.tempdir = None  # the process that forked this one has stored its own, here and in multiprocessing
    multiprocessing.current_process()._config.pop("tempdir", None)  # type: ignore[attr-defined]


def small_shared_memory() -> None:
    mount_tmpfs("/dev/shm", 256 * 1024)


def no_shared_memory() -> None:
    mount_tmpfs("/dev/shm", 4096)


def long_temporary_folder() -> None:
    use_temporary_folder(os.path.abspath("long" * 50))


def run_under(condition: Callable[[], None], arguments: tuple[str, ...]) -> int:
    from paceline.cli.app import run

    try:
        condition()
    except PermissionError:
        return SKIPPED
    return run(list(arguments))


SKIPPED = 99


def run_limited(folder: Path, condition: Callable[[], None], *arguments: str) -> Running:
    (running,) = start_function_in_ranks(folder, 1, run_under, condition, arguments)
    if running.wait() == SKIPPED:
        pytest.skip("needs root, to mount a tmpfs")
    return running


@pytest.mark.parametrize(
    ("condition", "place", "remedy"),
    [
        (small_shared_memory, "/dev/shm: ", "--shm-size"),
        (no_shared_memory, "/dev/shm: ", "--shm-size"),
        (long_temporary_folder, "(TMPDIR) has ", "set TMPDIR to a shorter path"),
    ],
)
def test_a_batch_that_cannot_be_shared_ends_training_with_the_place_and_the_remedy(
    tmp_path: Path, tiny: str, condition: Callable[[], None], place: str, remedy: str
) -> None:
    loading = ("--set", "loader=workers", "--set", "workers=2")
    run = ("train", tiny, "--set", "size=64", "--batch-size", "128", "--images", "256", "--out", "run")
    check_error(run_limited(tmp_path, condition, *run, *loading), place, remedy)


def test_packing_reports_that_its_loader_processes_cannot_share_memory(tmp_path: Path) -> None:
    (tmp_path / "images" / "a").mkdir(parents=True)
    for number in range(4):
        pixels = np.random.default_rng(number).integers(0, 256, (300, 300, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / "images" / "a" / f"{number}.png")
    pack = ("pack", "folder", "packed", "--data-root", "images", "--set", "size=300", "--set", "workers=1")
    check_error(run_limited(tmp_path, small_shared_memory, *pack), "/dev/shm: ", "--shm-size")


def read_with_few_files(folder: str) -> None:
    source, (_, most) = Photos("test", PhotoSettings(test_root=folder, workers=1)), resource.getrlimit(FILES)
    for spare in range(0, 32, 2):
        resource.setrlimit(FILES, (len(os.listdir("/proc/self/fd")) + spare, most))
        with pytest.raises(UserError, match=r"Too many open files.*`ulimit -n`.*--workers 0"):
            list(read_in_order(source, 2, 2**20))


def test_too_few_open_files_for_loader_processes_are_reported_before_any_process_starts(tmp_path: Path) -> None:
    (tmp_path / "images").mkdir()
    for number in range(4):
        Image.new("RGB", (64, 64 + number)).save(tmp_path / "images" / f"{number}.png")
    (running,) = start_function_in_ranks(tmp_path, 1, read_with_few_files, "images")
    assert running.wait() == 0 and not running.stderr, running.stderr


def check_error(running: Running, place: str, remedy: str) -> None:
    lines = running.stderr.splitlines()
    assert running.wait() == 2 and len(lines) == 1, running.stderr
    assert place in lines[0] and remedy in lines[0] and "--workers 0" in lines[0]
