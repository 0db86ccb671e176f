"""Mirroring (copying a run to remote storage) shows only complete snapshots and never disturbs training."""

from __future__ import annotations

import json
import shutil
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from holds import Holds
from running import Running, metrics_without_times, run_fork, start_fork, wait_until, weights_of

from paceline.board.files import LocalFiles
from paceline.board.gallery import Gallery
from paceline.core.errors import UserError
from paceline.core.files import checksum_of_file
from paceline.runs import mirror as mirror_module
from paceline.runs.checkpoint import CheckpointNumbers, Checkpoints, Snapshot, load
from paceline.runs.mirror import Mirror
from paceline.runs.published import (
    Destination,
    Manifest,
    Piece,
    list_manifests,
    read_manifest,
    restore,
)
from paceline.runs.status import MirrorState, Status

TINY = str(Path(__file__).resolve().parent.parent / "tiny.py")
QUICK = ("--set", "mirror_every=0.1")


@pytest.fixture(params=["file", "memory"])
def away(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return f"file://{tmp_path}/away" if request.param == "file" else f"memory://{tmp_path.name}"


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mirror_module, "FIRST_PAUSE_SECONDS", 0.01)


def make_run(folder: Path, *moments: int) -> Checkpoints:
    """Create a run folder with checkpoints at these image counts; only the last two are kept."""
    folder.mkdir(exist_ok=True)
    checkpoints = Checkpoints(folder / "checkpoints")
    for images in moments:
        weights = {"network.weight": torch.full((100,), float(images))}
        with (folder / "metrics.jsonl").open("a") as metrics:
            metrics.write(json.dumps({"images": images}) + "\n")
        checkpoints.save(Snapshot(images, weights, {}, CheckpointNumbers()))
        checkpoints.prune(2, None)
        (folder / "samples").mkdir(exist_ok=True)
        (folder / "samples" / f"samples-{images:012}.png").write_bytes(b"image %d" % images)
    (folder / "config.toml").write_text("seed = 0\n")
    Status.now("running", 1000).write(folder)
    return checkpoints


def mirror_once(folder: Path, destination: Destination, run: str = "one") -> str:
    mirror = Mirror(folder, destination, "away", run, every=0.05)
    mirror.check()
    mirror.begin()
    return mirror.finish(60)


def assert_whole(destination: Destination, scratch: Path) -> list[int]:
    """Check the checksums of all files in the mirror; return the image counts of its checkpoints."""
    manifests = [read_manifest(destination, name) for name in list_manifests(destination)]
    for manifest in manifests:
        for name, piece in manifest.files.items():
            destination.fetch(piece.object, scratch)
            assert checksum_of_file(scratch) == piece.sha256, f"{name} of the snapshot at {manifest.images} images"
    return [manifest.images for manifest in manifests]


class Watched:
    """A mirror destination that calls `before(number)` before each of its numbered operations."""

    def __init__(self, destination: Destination, before: Callable[[int], None]) -> None:
        self.destination, self.before, self.operations = destination, before, 0

    def __getattr__(self, name: str) -> Any:
        def operation(*arguments: Any) -> Any:
            self.operations += 1
            self.before(self.operations)
            return getattr(self.destination, name)(*arguments)

        return operation


def test_a_run_is_restored_from_its_mirror_to_an_empty_disk(tmp_path: Path, away: str) -> None:
    make_run(tmp_path / "run", 100, 200, 300)
    destination = Destination(away, "--mirror")
    assert mirror_once(tmp_path / "run", destination) == "mirror: away is complete"
    (tmp_path / "back").mkdir()
    assert restore(destination, tmp_path / "back", 0, pytest.fail, lambda: None) == 300
    for name in ("checkpoints", "samples", "metrics.jsonl", "config.toml"):
        files = [tmp_path / "run" / name, *(tmp_path / "run" / name).rglob("*")]
        for file in (file for file in files if file.is_file()):
            assert (tmp_path / "back" / file.relative_to(tmp_path / "run")).read_bytes() == file.read_bytes()
    assert Checkpoints(tmp_path / "back" / "checkpoints").all() == [200, 300]
    assert restore(destination, tmp_path / "back", 300, pytest.fail, lambda: None) == 300
    assert sorted(entry.name for entry in (tmp_path / "back").iterdir()) == sorted(
        ["checkpoints", "samples", "metrics.jsonl", "config.toml"]
    )


def test_readers_see_complete_snapshots_whichever_write_operation_fails(tmp_path: Path) -> None:
    destination = Destination(f"file://{tmp_path}/away", "--mirror")
    make_run(tmp_path / "run", 100)
    mirror_once(tmp_path / "run", destination)
    make_run(tmp_path / "run", 200, 300)  # the checkpoint at 100 no longer exists when these are uploaded

    def fail_once(at: int) -> Callable[[int], None]:
        def before(number: int) -> None:
            if number == at:
                seen.append(assert_whole(destination, tmp_path / "scratch"))
                raise ConnectionError("the server went away")

        return before

    saved = tmp_path / "saved"
    shutil.copytree(tmp_path / "run", saved)
    copy_of(destination, tmp_path / "start")
    counting = Watched(destination, lambda number: None)
    mirror_once(tmp_path / "run", counting)  # type: ignore[arg-type]
    assert counting.operations > 15
    for at in range(1, counting.operations + 1):
        put_back(destination, tmp_path / "start")
        seen: list[list[int]] = []
        watched = Watched(destination, fail_once(at))
        assert "is complete" in mirror_once(saved, watched)  # type: ignore[arg-type]
        assert len(seen) == 1 and seen[0] and assert_whole(destination, tmp_path / "scratch") == [300, 100], at
    named = {name for name in destination.sizes("checkpoints") if "manifest" in name}
    assert named == {f"checkpoints/{images:012d}/manifest.json" for images in (100, 200, 300)}


def copy_of(destination: Destination, folder: Path) -> None:
    for name in destination.sizes(""):
        (folder / name.lstrip("/")).parent.mkdir(parents=True, exist_ok=True)
        destination.fetch(name.lstrip("/"), folder / name.lstrip("/"))


def put_back(destination: Destination, folder: Path) -> None:
    for name in destination.sizes(""):
        destination.remove(name.lstrip("/"))
    for file in folder.rglob("*"):
        if file.is_file():
            destination.send(file, file.relative_to(folder).as_posix())


def test_an_incomplete_snapshot_in_a_mirror_is_skipped(tmp_path: Path) -> None:
    destination = Destination(f"file://{tmp_path}/away", "--mirror")
    for moments in ((100,), (200,)):
        make_run(tmp_path / "run", *moments)
        mirror_once(tmp_path / "run", destination)
    half = (tmp_path / "away" / "mirror" / "000000000200-0001.json").read_bytes()
    (tmp_path / "away" / "mirror" / "000000000300-0001.json").write_bytes(half[: len(half) // 2])
    (tmp_path / "away" / "checkpoints" / "000000000200" / "weights.safetensors").write_bytes(b"other")
    lines: list[str] = []
    (tmp_path / "back").mkdir()
    assert restore(destination, tmp_path / "back", 0, lines.append, lambda: None) == 100
    assert len(lines) == 2 and "000000000300-0001.json is damaged" in lines[0]
    assert "weights.safetensors does not match its recorded SHA-256" in lines[1]
    assert load(tmp_path / "back" / "checkpoints" / "000000000100").images == 100
    shutil.rmtree(tmp_path / "away" / "checkpoints")
    with pytest.raises(UserError, match="all snapshots are damaged"):
        restore(destination, tmp_path / "back", 0, lines.append, lambda: None)


@pytest.mark.parametrize("name", ["../outside", "/tmp/outside", "checkpoints/../../outside", "checkpoints/1/a", "x.py"])
def test_a_mirror_manifest_that_lists_unexpected_files_is_rejected(name: str) -> None:
    with pytest.raises(ValueError, match="not part of a snapshot"):
        Manifest.parse(Manifest("one", 100, {name: Piece(name, "0" * 64, 1)}).encode())


def test_a_slow_upload_does_not_block_training_or_the_deletion_of_old_checkpoints(tmp_path: Path) -> None:
    checkpoints, reached, released = make_run(tmp_path / "run", 100), threading.Event(), threading.Event()

    def hold(number: int) -> None:
        if number == 4:  # during the upload of the first checkpoint
            reached.set()
            released.wait(60)

    destination = Destination(f"file://{tmp_path}/away", "--mirror")
    mirror = Mirror(tmp_path / "run", Watched(destination, hold), "away", "one", every=60)  # type: ignore[arg-type]
    mirror.check()
    mirror.begin()
    assert reached.wait(60)
    make_run(tmp_path / "run", 200, 300, 400)
    assert checkpoints.all() == [300, 400]
    began = time.monotonic()
    mirror.notify()
    assert "the checkpoint at 400 images is missing" in mirror.finish(0.2) and time.monotonic() - began < 30
    assert list_manifests(destination) == []
    released.set()
    wait_until(lambda: [int(name[7:19]) for name in list_manifests(destination)] == [400, 100])
    assert_whole(destination, tmp_path / "scratch")


def test_a_mirror_of_a_different_or_longer_run_is_rejected_and_left_unchanged(tmp_path: Path) -> None:
    make_run(tmp_path / "run", 100, 200)
    destination = Destination(f"file://{tmp_path}/away", "--mirror")
    mirror_once(tmp_path / "run", destination)
    before = destination.sizes("")
    ahead = "at 200 images, but --out is at 0"
    for folder, run, message in (("run", "two", "contains another run"), ("empty", "one", ahead)):
        (tmp_path / folder).mkdir(exist_ok=True)
        with pytest.raises(UserError, match=message):
            mirror_once(tmp_path / folder, destination, run)
    assert destination.sizes("") == before


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("s3://AKIAABCDEFGHIJKLMNOP:secret@bucket/run", "contains a credential"),
        ("https://host/run?token=abcdef", "contains a credential"),
        ("nonsense://bucket/run", "Protocol not known: nonsense"),
        ("zip::file:///somewhere", "chained URLs are not supported"),
    ],
)
def test_an_unusable_mirror_url_is_reported_in_one_line_without_its_credentials(url: str, message: str) -> None:
    with pytest.raises(UserError, match=message) as raised:
        Destination(url, "--mirror")
    assert "secret" not in str(raised.value) and "abcdef" not in str(raised.value)


def test_a_mirror_failure_is_printed_once_and_recorded_until_mirroring_works_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_run(tmp_path / "run", 100)
    broken = threading.Event()
    broken.set()

    def fail(number: int) -> None:
        if broken.is_set():
            raise PermissionError("wrong key, token=abcdef")

    destination = Destination(f"file://{tmp_path}/away", "--mirror")
    mirror = Mirror(tmp_path / "run", Watched(destination, fail), "away", "one", every=0.01)  # type: ignore[arg-type]
    mirror.check()
    mirror.begin()
    wait_until(lambda: mirror.destination.operations > 3)  # type: ignore[attr-defined]
    gallery = Gallery(LocalFiles(tmp_path))
    gallery.refresh()
    (run,) = (run for run in gallery.summaries().runs if run["name"] == "run")
    assert run["mirror"]["images"] == 0 and run["mirror"]["error"] == "PermissionError: wrong key, token=***"
    broken.clear()
    assert "is complete" in mirror.finish(60)
    printed = capsys.readouterr().out.splitlines()
    failed, again = "mirror: upload to away failed", "mirror: away is reachable again"
    assert [line.partition(" (")[0] for line in printed] == [failed, again]
    assert "training continues" in printed[0] and "abcdef" not in printed[0]
    state = MirrorState.parse((tmp_path / "run" / "mirror.json").read_bytes())
    assert state and (state.images, state.error) == (100, "")


def published(away: Path) -> list[int]:
    return [int(file.name[:12]) for file in sorted((away / "mirror").glob("*.json"))]


def test_a_run_that_lost_its_disk_resumes_from_its_mirror_with_bit_identical_weights(tmp_path: Path) -> None:
    holds = Holds(tmp_path / "holds")
    command = ("train", TINY, "--set", "dropout=0.2", *QUICK, *holds.settings)
    assert run_fork(tmp_path, *command, "--out", "whole").wait() == 0
    url = f"file://{tmp_path}/away"
    both = (*command, "--out", "run", "--mirror", url, "--resume-from", url)
    holds.hold("loss", after=17)
    first = start_fork(tmp_path, *both)
    wait_until(lambda: published(tmp_path / "away")[-1:] >= [160], first)
    first.kill()
    first.wait()
    holds.release("loss")
    assert "contains no run yet" in first.stdout
    shutil.rmtree(tmp_path / "run")
    alone = run_fork(tmp_path, *command, "--out", "run", "--mirror", url)
    assert alone.wait() == 2 and f"use --resume-from {url} to resume from the mirror" in alone.stderr
    again = run_fork(tmp_path, *both)
    assert again.wait() == 0 and "restored the run at" in again.stdout and "resuming from" in again.stdout
    assert f"mirror: {url} is complete" in again.stdout
    assert weights_of(tmp_path / "run") == weights_of(tmp_path / "whole")
    assert metrics_without_times(tmp_path / "run") == metrics_without_times(tmp_path / "whole")
    assert weights_of(tmp_path / "away") == weights_of(tmp_path / "whole")
    for name in ("metrics.jsonl", "status.json", "config.toml"):
        assert (tmp_path / "away" / name).read_bytes() == (tmp_path / "run" / name).read_bytes()
    assert not (tmp_path / "run" / ".mirror").exists()


def test_training_continues_when_the_mirror_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "away").write_text("a file where the folder should be")
    holds = Holds(tmp_path / "holds")
    holds.hold("loss", after=9)
    mirror = ("--mirror", f"file://{tmp_path}/away/run", "--set", "mirror_wait=1")
    running = start_fork(tmp_path, "train", TINY, *QUICK, "--out", "run", *mirror, *holds.settings)
    wait_until(lambda: "mirror: upload" in running.stdout, running)
    holds.release("loss")
    assert running.wait() == 74 and running.stderr == ""
    lines = [line for line in running.stdout.splitlines() if line.startswith("mirror:")]
    assert len(lines) == 2 and "failed" in lines[0] and "the checkpoint at 480 images is missing" in lines[1]
    assert lines[0] in (tmp_path / "run" / "logs" / "rank-0.txt").read_text()
    state = MirrorState.parse((tmp_path / "run" / "mirror.json").read_bytes())
    assert state and state.images == 0 and state.error
    assert Status.parse((tmp_path / "run" / "status.json").read_bytes()).state == "finished"  # type: ignore[union-attr]
    (tmp_path / "away").unlink()
    again = run_fork(tmp_path, "train", TINY, *QUICK, "--out", "run", *mirror, *holds.settings)
    assert again.wait() == 0 and "is complete" in again.stdout


def test_a_stop_request_ends_the_wait_for_a_mirror_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "away").write_text("a file where the folder should be")
    mirror = ("--mirror", f"file://{tmp_path}/away/run", "--set", "mirror_wait=100000", "--timeout", "200000")
    running = start_fork(tmp_path, "train", TINY, *QUICK, "--out", "run", *mirror)
    wait_until(lambda: "\nrun: run\n" in running.stdout, running)
    running.kill(signal.SIGTERM)
    assert running.wait() == 74 and "is not complete" in running.stdout


@pytest.mark.slow
def test_the_launcher_reports_an_incomplete_mirror_of_a_finished_run(tmp_path: Path) -> None:
    (tmp_path / "away").write_text("a file where the folder should be")
    mirror = ("--mirror", f"file://{tmp_path}/away/run", "--set", "mirror_wait=1")
    running = run_fork(tmp_path, "train", TINY, *QUICK, "--out", "run", *mirror, "--devices", "2", "--images", "64")
    assert running.wait() == 74 and running.stderr == ""
    status = Status.of(tmp_path / "run")
    assert status and status.state == "finished"


def test_a_failed_run_is_also_marked_as_failed_in_its_mirror(tmp_path: Path) -> None:
    away, command = tmp_path / "away", ("train", TINY, *QUICK, "--out", "run", "--mirror", f"file://{tmp_path}/away")
    failed: Running = run_fork(tmp_path, *command, "--set", "not_finite_at=20")
    assert failed.wait() == 2 and "is not finite" in failed.stderr
    status = Status.parse((away / "status.json").read_bytes())
    assert status and status.state == "failed" and "is not finite" in status.reason
    assert "the last checkpoint is at" in failed.stderr and published(away)[-1] > 0
