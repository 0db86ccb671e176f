"""Checkpoints are written completely or not at all, contain no pickles, and are skipped if damaged."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import safetensors.torch
import torch
from running import run_fork, weights_of
from torch import Tensor

from paceline.core.errors import UserError
from paceline.runs.checkpoint import Best, CheckpointNumbers, Checkpoints, Snapshot, choose_checkpoint, is_whole, load
from paceline.runs.tensor_files import unpack, write_tensors


def snapshot(images: int, value: float = 1.0) -> Snapshot:
    weights = {"network.weight": torch.full((3, 2), value), "ema/network.weight": torch.zeros(3, 2)}
    numbers = CheckpointNumbers(scalers={"network": {"scale": 65536.0, "_growth_tracker": 3}})
    return Snapshot(images, weights, {"network/weight/step": torch.tensor(images)}, numbers)


def with_best(whole: Snapshot, images: int) -> Snapshot:
    best = Best("validation/top1", 0.5, images)
    return dataclasses.replace(whole, numbers=dataclasses.replace(whole.numbers, best=best))


def same(first: Snapshot, second: Snapshot) -> bool:
    def equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
        return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)

    numbers = (first.images, first.numbers) == (second.images, second.numbers)
    return numbers and equal(first.weights, second.weights) and equal(first.state, second.state)


def test_a_checkpoint_is_loaded_as_saved_and_contains_no_pickle(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    path = checkpoints.save(snapshot(640))
    assert same(load(path), snapshot(640))
    assert sorted(file.name for file in path.iterdir()) == [
        "manifest.json",
        "state.json",
        "state.safetensors",
        "weights.safetensors",
    ]
    for file in path.iterdir():
        content = file.read_bytes()
        assert not content.startswith((b"\x80", b"PK"))  # first bytes of pickle files and of torch's zip archives
        assert file.suffix == ".safetensors" or json.loads(content)


def test_shared_and_channels_last_tensors_are_restored(tmp_path: Path) -> None:
    shared = torch.arange(6.0).reshape(2, 3)
    last = torch.arange(48.0).reshape(2, 3, 2, 4).to(memory_format=torch.channels_last)
    empty = {"empty": torch.zeros(0, 3), "also": torch.zeros(0)}
    tensors = {"a": shared, "b": shared, "c": last, "transposed": shared.t(), **empty}
    notes = write_tensors(tmp_path / "x", tensors, {})
    content = (tmp_path / "x").read_bytes()
    back = unpack(content, notes)
    assert back.keys() == tensors.keys()
    assert all(torch.equal(back[name], tensors[name]) for name in tensors)
    assert back["a"].data_ptr() == back["b"].data_ptr()
    assert back["c"].is_contiguous(memory_format=torch.channels_last)
    assert set(safetensors.torch.load(content)) == {"a", "c", "transposed", "empty", "also"}


Damage = Callable[[Path], object]


def flip_bit(name: str, position: float) -> Damage:
    def flip(path: Path) -> None:
        content = bytearray((path / name).read_bytes())
        content[int(position * len(content))] ^= 1
        (path / name).write_bytes(content)

    return flip


def truncate(name: str) -> Damage:
    return lambda path: os.truncate(path / name, (path / name).stat().st_size // 2)


def other_format(path: Path) -> None:
    manifest = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(json.dumps(manifest | {"format": 99}))


DAMAGES: dict[str, tuple[Damage, str]] = {
    "bit of the weights": (flip_bit("weights.safetensors", 0.9), "weights.safetensors does not match its recorded"),
    "half the weights": (truncate("weights.safetensors"), "weights.safetensors does not match its recorded SHA-256"),
    "bit of the numbers": (flip_bit("state.json", 0.5), "state.json does not match its recorded SHA-256"),
    "no weights": (lambda path: (path / "weights.safetensors").unlink(), "weights.safetensors is missing"),
    "no manifest": (lambda path: (path / "manifest.json").unlink(), "manifest.json is missing"),
    "half the manifest": (truncate("manifest.json"), "manifest.json cannot be read"),
    "another thing": (lambda path: (path / "manifest.json").write_bytes(b"[]"), "manifest.json cannot be read"),
    "later format": (other_format, "manifest.json has format 99, but this version of Paceline reads format 2"),
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_a_damaged_checkpoint_is_reported_and_the_previous_one_is_used(tmp_path: Path, kind: str) -> None:
    damage, reason = DAMAGES[kind]
    checkpoints, lines = Checkpoints(tmp_path), []
    for images in (640, 1280):
        checkpoints.save(snapshot(images, images))
    damage(checkpoints.path(1280))
    found = checkpoints.latest(lines.append)
    assert found and same(found, snapshot(640, 640))
    assert len(lines) == 1 and str(checkpoints.path(1280)) in lines[0] and reason in lines[0]
    with pytest.raises(UserError, match="is damaged"):
        load(checkpoints.path(1280))


def test_any_flipped_bit_in_a_checkpoint_is_detected(tmp_path: Path) -> None:
    path = Checkpoints(tmp_path).save(snapshot(640))
    whole = json.loads((path / "manifest.json").read_text())
    for file in path.iterdir():
        content = file.read_bytes()
        for position in range(0, len(content), 7):
            broken = bytearray(content)
            broken[position] ^= 1 << (position % 8)
            file.write_bytes(broken)
            # A flipped bit in the whitespace of the manifest may go undetected, since it does not change the content.
            unchanged = file.name == "manifest.json" and is_whole(path) and json.loads(file.read_text()) == whole
            assert not is_whole(path) or unchanged, f"{file.name}: byte {position}"
        file.write_bytes(content)
    assert is_whole(path)


def test_nothing_is_deleted_if_no_checkpoint_is_intact_and_a_reader_is_not_told_to_write_elsewhere(
    tmp_path: Path,
) -> None:
    checkpoints = Checkpoints(tmp_path)
    with pytest.raises(UserError, match="train the run until it has saved one"):
        choose_checkpoint(checkpoints, "best")
    for images in (640, 1280):
        checkpoints.save(snapshot(images))
        (checkpoints.path(images) / "state.json").unlink()
    with pytest.raises(UserError, match="there is no earlier checkpoint"):
        checkpoints.latest(lambda line: None)
    with pytest.raises(UserError, match="train the run again") as error:
        choose_checkpoint(checkpoints, "best")
    assert "--out" not in str(error.value) and checkpoints.all() == [640, 1280]


def test_a_damaged_checkpoint_is_set_aside_or_replaced(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    for images in (640, 1280):
        checkpoints.save(snapshot(images))
    truncate("weights.safetensors")(checkpoints.path(1280))
    checkpoints.set_aside_after(640)
    assert checkpoints.all() == [640]
    assert (tmp_path / "damaged-000000001280" / "state.safetensors").exists()
    truncate("weights.safetensors")(checkpoints.save(snapshot(1280, 1.0)))
    assert same(load(checkpoints.save(snapshot(1280, 2.0))), snapshot(1280, 2.0))


def test_the_last_checkpoints_and_the_best_checkpoint_are_kept(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    for images in (100, 200, 1000, 2000, 3000):
        checkpoints.save(snapshot(images))
    checkpoints.prune(keep=2, best=200)
    assert checkpoints.all() == [200, 2000, 3000]
    checkpoints.prune(keep=1, best=None)
    assert checkpoints.all() == [3000]
    assert [entry.name for entry in tmp_path.iterdir()] == ["000000003000"]


def test_a_run_that_resumes_from_an_older_checkpoint_also_restores_the_best_checkpoint_at_that_time(
    tmp_path: Path,
) -> None:
    checkpoints = Checkpoints(tmp_path)
    for images, best in ((50, 50), (100, 100), (200, 100), (300, 300)):
        checkpoints.save(with_best(snapshot(images), best))
        checkpoints.prune(keep=2, best=best)
    assert checkpoints.all() == [100, 200, 300]
    truncate("weights.safetensors")(checkpoints.path(300))
    found = checkpoints.latest(lambda line: None)
    assert found and found.images == 200
    checkpoints.set_aside_after(200)
    assert load(checkpoints.path(found.best_images)).images == 100
    (checkpoints.path(200) / "state.json").write_text("damaged")
    checkpoints.prune(keep=1, best=100)
    assert checkpoints.all() == [100, 200]


def test_leftovers_from_an_interrupted_save_or_deletion_are_removed(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    for leftover in (".writing-000000000640", ".writing-000000000320", ".removing-000000000100"):
        (tmp_path / leftover).mkdir()
        (tmp_path / leftover / "weights.safetensors").write_bytes(b"half")
    assert checkpoints.all() == [] and checkpoints.latest(pytest.fail) is None
    checkpoints.save(snapshot(640))
    assert [entry.name for entry in tmp_path.iterdir()] == ["000000000640"]


def test_a_checkpoint_that_was_being_replaced_is_restored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoints, rename = Checkpoints(tmp_path), Path.rename
    first = snapshot(640)
    checkpoints.save(first)

    def killed(path: Path, target: Path) -> Path:
        if path.name.startswith(".writing"):
            raise KeyboardInterrupt
        return rename(path, target)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Path, "rename", killed)
        checkpoints.save(with_best(first, 640))
    assert checkpoints.latest(pytest.fail) is None, "a reader must not complete the replacement"
    checkpoints.restore_replaced()
    found = checkpoints.latest(pytest.fail)
    assert found and same(found, first)
    checkpoints.save(with_best(first, 640))
    assert [entry.name for entry in tmp_path.iterdir()] == ["000000000640"]
    assert load(checkpoints.path(640)).numbers.best == Best("validation/top1", 0.5, 640)


def test_a_training_run_keeps_its_last_checkpoints_and_the_best_checkpoint(tmp_path: Path, tiny: str) -> None:
    command = ("--images", "320", "--set", "save_every=2 steps", "--set", "keep=3", "--set", "evaluate_every=4 steps")
    assert run_fork(tmp_path, "train", tiny, "--out", "run", *command).wait() == 0
    checkpoints = Checkpoints(tmp_path / "run" / "checkpoints")
    last = [256, 288, 320]
    assert checkpoints.all() == sorted({*last, *(load(checkpoints.path(one)).best_images for one in last)})


def test_a_run_resumed_after_checkpoint_damage_ends_with_the_same_weights(tmp_path: Path, tiny: str) -> None:
    command = ("train", tiny, "--out", "run", "--set", "keep=9", "--set", "evaluate_every=30 steps")
    assert run_fork(tmp_path, *command).wait() == 0
    whole = weights_of(tmp_path / "run")
    for images in (400, 480):
        flip_bit("weights.safetensors", 0.8)(tmp_path / "run" / "checkpoints" / f"{images:012d}")
    again = run_fork(tmp_path, *command)
    assert again.wait() == 0 and again.stderr == ""
    printed = [line for line in again.stdout.splitlines() if "damaged" in line]
    assert ["000000000480" in line or "000000000400" in line for line in printed] == [True, True]
    assert "resuming from 320 images" in again.stdout
    assert weights_of(tmp_path / "run") == whole


def test_a_checkpoint_too_large_for_the_disk_ends_the_run_with_one_line(tmp_path: Path, tiny: str) -> None:
    command = ("train", tiny, "--out", "run", "--set", "width=64")
    assert run_fork(tmp_path, *command, "--images", "80").wait() == 0
    before = weights_of(tmp_path / "run")
    assert len(before["weights.safetensors"]) > 20_000
    full = run_fork(tmp_path, *command, largest_file=20_000)
    assert full.wait() == 2
    assert len(full.stderr.splitlines()) == 1, full.stderr
    assert "cannot write checkpoint run/checkpoints/000000000" in full.stderr and "File too large" in full.stderr
    assert "the last checkpoint is at 80 images" in full.stderr
    assert weights_of(tmp_path / "run") == before
    assert not list((tmp_path / "run" / "checkpoints").glob(".*"))
    assert run_fork(tmp_path, *command).wait() == 0


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A one-megabyte file system; the test is skipped if the user may not mount file systems."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(disk)], capture_output=True).returncode:
        pytest.skip("cannot mount a small file system")
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)


def test_a_full_disk_prints_one_line_and_keeps_the_last_checkpoint(tmp_path: Path, small_disk: Path, tiny: str) -> None:
    run, constant = small_disk / "run", ("--set", "schedule=constant")
    command = ("train", tiny, "--out", str(run), *constant)
    assert run_fork(tmp_path, *command, "--images", "80").wait() == 0
    for room in (0, 16384):  # bytes left on the disk; each value makes a different write fail
        kept = Checkpoints(run / "checkpoints").all()[-1]
        before = weights_of(run)
        filler = small_disk / "filler"
        with filler.open("wb") as file, pytest.raises(OSError):
            while True:
                os.write(file.fileno(), bytes(4096))
        os.truncate(filler, filler.stat().st_size - room)
        full = run_fork(tmp_path, *command)
        assert full.wait() == 2
        assert len(full.stderr.splitlines()) == 1, full.stderr
        assert "No space left on device" in full.stderr
        last = Checkpoints(run / "checkpoints").all()[-1]  # the disk may have had room for another checkpoint
        assert f"the last checkpoint is at {last} images" in full.stderr
        assert weights_of(run, kept) == before
        filler.unlink()
    assert run_fork(tmp_path, *command).wait() == 0
    assert run_fork(tmp_path, "train", tiny, "--out", "elsewhere", *constant).wait() == 0
    assert weights_of(run)["weights.safetensors"] == weights_of(tmp_path / "elsewhere")["weights.safetensors"]
