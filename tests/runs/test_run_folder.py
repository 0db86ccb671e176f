"""Only one process may write to a run folder, and only some settings may change on resume."""

from __future__ import annotations

import json
import os
import shutil
import socket
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from holds import Holds
from running import metrics_without_times, run_fork, run_ranks, start_fork, wait_until, weights_of

from paceline.cli.app import run as run_command
from paceline.core.errors import UserError
from paceline.runs.checkpoint import CheckpointNumbers, Snapshot, choose_checkpoint
from paceline.runs.folder import RunFolder
from paceline.runs.metrics import read_metrics


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, tiny: str) -> Path:
    """A finished run with 80 images."""
    folder = tmp_path_factory.mktemp("trained")
    assert run_fork(folder, "train", tiny, "--out", "run", "--images", "80").wait() == 0
    return folder / "run"


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    """A copy of the finished run."""
    return shutil.copytree(trained, tmp_path / "run")


def test_a_run_folder_in_use_is_rejected_and_its_run_is_not_disturbed(tmp_path: Path, tiny: str) -> None:
    holds = Holds(tmp_path / "holds")
    holds.hold("loss")
    command = ("train", tiny, *holds.settings)
    first = start_fork(tmp_path, *command, "--out", "run")
    holds.wait_for("loss", first)
    second = run_fork(tmp_path, *command, "--out", "run")
    assert not first.ended
    assert second.wait() == 2
    message = f"--out run: this run is in use by process {first.pid}; choose a different --out"
    assert second.stderr == f"paceline: {message}\n"
    holds.release("loss")
    assert first.wait() == 0 and first.stderr == ""


def test_a_changed_worker_count_is_recorded_only_if_the_loader_uses_workers(tmp_path: Path, tiny: str) -> None:
    for loader, expected in (("resident", 0), ("workers", 1)):
        command = ("train", tiny, "--batch-size", "16", "--loader", loader, "--out", loader)
        assert run_fork(tmp_path, *command, "--images", "32", "--workers", "1").wait() == 0
        assert run_fork(tmp_path, *command, "--images", "64", "--workers", "2").wait() == 0
        config = (tmp_path / loader / "config.toml").read_text()
        assert config.count("[[provenance.earlier]]") == expected, config


def test_a_run_is_unchanged_if_its_weights_do_not_fit_the_network(tmp_path: Path, tiny: str) -> None:
    recipe = Path(shutil.copyfile(tiny, tmp_path / "mine.py"))
    command = ("train", str(recipe), "--batch-size", "16", "--images", "32", "--out", "run")
    assert run_fork(tmp_path, *command).wait() == 0
    kept = {name: (tmp_path / "run" / name).read_bytes() for name in ("status.json", "metrics.jsonl", "config.toml")}
    recipe.write_text(Path(tiny).read_text().replace("nn.Linear(", "nn.Linear(1 + ", 1))
    changed = run_fork(tmp_path, *command, "--images", "64")
    assert changed.wait() != 0
    assert {name: (tmp_path / "run" / name).read_bytes() for name in kept} == kept


def test_a_folder_with_unrelated_files_is_rejected_and_left_unchanged(tmp_path: Path, tiny: str) -> None:
    full = tmp_path / "full"
    full.mkdir()
    (full / "diary.txt").touch()
    rejected = run_fork(tmp_path, "train", tiny, "--out", "full")
    assert rejected.wait() == 2 and "the folder exists and is not a run (it contains diary" in rejected.stderr
    assert [file.name for file in full.iterdir()] == ["diary.txt"]
    (full / "diary.txt").rename(full / ".gitkeep")
    (full / "launch").mkdir()  # a job file may be in the folder before the run starts
    assert run_fork(tmp_path, "train", tiny, "--out", "full").wait() == 0


def test_opening_a_run_folder_for_writing_removes_old_temporary_files_only(tmp_path: Path) -> None:
    (tmp_path / ".0123456789abcdef.writing").write_text("half a config")
    os.utime(tmp_path / ".0123456789abcdef.writing", (0, 0))
    (tmp_path / ".fedcba9876543210.writing").write_text("another command is writing this")
    (tmp_path / ".gitkeep").touch()
    folder = RunFolder(tmp_path)
    folder.claim()
    folder.release()
    assert sorted(entry.name for entry in tmp_path.iterdir()) == [".fedcba9876543210.writing", ".gitkeep", ".lock"]


def test_a_run_in_use_on_another_host_is_reported_with_the_host_and_its_lock_can_be_removed(tmp_path: Path) -> None:
    one, other = RunFolder(tmp_path / "run"), RunFolder(tmp_path / "run")
    other.claim()
    other.release()
    one.claim()
    lock = tmp_path / "run" / ".lock"
    assert lock.read_text() == f"{os.getpid()} {socket.gethostname()}\n"
    lock.write_text("123 gpu-3\n")  # as if a process on another host held the lock
    with pytest.raises(UserError) as raised:
        other.claim()
    assert str(raised.value) == (
        f"--out {tmp_path / 'run'}: this run is in use by process 123 on host gpu-3; "
        f"choose a different --out, or remove {lock} if that process no longer exists"
    )
    lock.unlink()
    other.claim()
    with pytest.raises(UserError, match="the folder was removed or replaced"):
        one.check_present()
    other.release()
    one.release()


def test_other_settings_another_recipe_or_a_missing_record_are_rejected_on_resume(
    run: Path, tiny: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(run.parent)
    command = ("train", tiny, "--out", "run")
    before = weights_of(run), (run / "config.toml").read_text()
    shutil.copyfile(tiny, run.parent / "other.py")
    for words, message in (
        ((*command, "--lr", "0.2", "--seed", "3"), "(seed: 0 → 3; lr: 0.05 → 0.2)"),
        ((*command, "--set", "classifier.lr=0.2"), "(classifier.lr: None → 0.2)"),
        ((*command, "--set", "width=8"), "(width: 4 → 8)"),
        ((*command, "--batch-size", "32"), "(batch_size: 16 → 32)"),
        ((*command, "--precision", "bf16"), "(precision: fp32 → bf16)"),
        (("train", "./other.py", "--out", "run"), "this run was trained with a different recipe"),
    ):
        assert run_command(list(words)) == 2
        line = capsys.readouterr().err
        assert line.count("\n") == 1 and message in line
    assert (weights_of(run), (run / "config.toml").read_text()) == before
    for content in (None, "", "# nothing\n", "recipe = "):
        (run / "config.toml").unlink(missing_ok=True)
        if content is not None:
            (run / "config.toml").write_text(content)
        assert run_command([*command, "--images", "96"]) == 2
        line = capsys.readouterr().err
        assert line.count("\n") == 1 and "config.toml" in line
    assert weights_of(run) == before[0]


def test_a_run_without_a_checkpoint_may_restart_with_different_settings(run: Path, tiny: str) -> None:
    shutil.rmtree(run / "checkpoints")
    begun = run_fork(run.parent, "train", tiny, "--out", "run", "--images", "16", "--lr", "0.2")
    assert begun.wait() == 0, begun.stderr
    assert "lr = 0.2" in (run / "config.toml").read_text()


def test_devices_strategy_loader_length_and_logging_may_change_on_resume(tmp_path: Path, tiny: str) -> None:
    command = ("train", tiny, "--out", "run", "--set", "schedule=constant")
    assert run_fork(tmp_path, *command, "--images", "96").wait() == 0
    two = ("--devices", "2", "--strategy", "ddp", "--images", "192", "--set", "log_every=1 steps", "--set", "keep=5")
    assert run_ranks(tmp_path, 2, *command, *two) == [0, 0]
    three = ("--loader", "workers", "--workers", "1", "--epochs", "0.2", "--images", "0", "--set", "save_every=1 epoch")
    last = run_fork(tmp_path, *command, *three)
    assert last.wait() == 0 and "resuming from 192 images" in last.stdout
    kept = tomllib.loads((tmp_path / "run" / "config.toml").read_text())
    assert kept["images"] == 0
    segments = [(one["until_images"], one["strategy"], one["devices"]) for one in kept["provenance"]["earlier"]]
    assert segments == [(96, "single", 1), (192, "ddp", 2)], "the record must list the earlier segments of the run"


def test_a_resume_that_was_killed_before_its_first_checkpoint_is_not_recorded(run: Path, tiny: str) -> None:
    before = (run / "config.toml").read_bytes()
    rarely = ("--set", "save_every=9000000 images", "--set", "evaluate_every=9000000 images")
    command = ("train", tiny, "--out", "run", "--images", "9600000", "--loader", "workers", *rarely)
    longer = start_fork(run.parent, *command)
    wait_until(lambda: '"running"' in (run / "status.json").read_text(), longer)
    longer.kill()
    longer.wait()
    assert (run / "config.toml").read_bytes() == before


def test_a_command_that_trains_nothing_does_not_change_a_finished_run(tmp_path: Path, tiny: str) -> None:
    command = ("train", tiny, "--out", "run")
    assert run_ranks(tmp_path, 2, *command, "--devices", "2", "--images", "96") == [0, 0]

    def record() -> dict[str, tuple[bytes, int]]:
        files = [file for file in (tmp_path / "run").rglob("*") if file.is_file() and file.name != ".lock"]
        return {str(file): (file.read_bytes(), file.stat().st_mtime_ns) for file in files if "logs" not in file.parts}

    before = record()
    for images, message in (("96", "already finished at 96 images\n"), ("48", "past the requested 48: nothing")):
        again = run_fork(tmp_path, *command, "--images", images)
        assert again.wait() == 0 and message in again.stdout, again.stderr
        assert "test metrics for the checkpoint at 96 images" in again.stdout, (
            "the trained weights must still be evaluated"
        )
        assert record() == before


def test_a_stopped_run_finished_with_a_shorter_length_keeps_its_provenance(tmp_path: Path, tiny: str) -> None:
    command = ("train", tiny, "--out", "run", "--set", "save_every=16 images")
    assert run_ranks(tmp_path, 2, *command, "--devices", "2", "--images", "48") == [0, 0]
    logs = {file.name: file.read_text() for file in (tmp_path / "run" / "logs").iterdir()}
    assert logs.keys() == {"rank-0.txt", "rank-1.txt"} and "batch 16 = 2 devices × 8 × 1" in logs["rank-0.txt"]
    lines = metrics_without_times(tmp_path / "run")
    assert [line["images"] for line in lines if "classifier/cross_entropy" in line] == [16, 32, 48], (
        "only rank 0 writes"
    )
    assert "spread/classifier/cross_entropy" in lines[0]
    config, status = tmp_path / "run" / "config.toml", tmp_path / "run" / "status.json"
    config.write_text(config.read_text().replace("images = 48", "images = 480"))
    status.write_text(status.read_text().replace("finished", "stopped").replace("48", "480"))
    before = tomllib.loads(config.read_text())
    assert run_fork(tmp_path, *command, "--images", "32").wait() == 0
    assert tomllib.loads(config.read_text()) == before and json.loads(status.read_text())["state"] == "stopped"
    assert run_fork(tmp_path, *command, "--images", "48").wait() == 0
    assert tomllib.loads(config.read_text()) == before | {"images": 48}
    assert json.loads(status.read_text())["state"] == "finished"


def test_run_folders_are_synced_to_disk_when_a_checkpoint_is_saved(tmp_path: Path, monkeypatch: Any) -> None:
    synced: list[int] = []
    fsync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda file: (synced.append(os.fstat(file).st_ino), fsync(file)))
    folder = RunFolder(tmp_path / "run")
    folder.claim()
    folder.checkpoints.save(Snapshot(16, {"a": torch.zeros(1)}, {}, CheckpointNumbers()))
    folder.release()
    names = {path.stat().st_ino for path in (tmp_path, tmp_path / "run", tmp_path / "run" / "checkpoints")}
    assert names <= set(synced)


def test_changed_data_or_labels_with_the_same_name_are_rejected_on_resume(tmp_path: Path, tiny: str) -> None:
    images = np.random.default_rng(0).integers(256, size=(80, 8, 8, 1), dtype=np.uint8)
    for name, length, shift in (("a", 64, 0), ("longer", 80, 0), ("relabelled", 64, 1)):
        x, y = images[:length], np.arange(shift, shift + length) % 10
        np.savez(tmp_path / f"{name}.npz", x_train=x, y_train=y, x_test=x, y_test=y)
    command = ("train", tiny, "--data", "npz", "--out", "run", "--images", "32")
    assert run_fork(tmp_path, *command, "--data-root", "a.npz").wait() == 0
    for name in ("longer", "relabelled"):
        rejected = run_fork(tmp_path, *command, "--data-root", f"{name}.npz")
        assert rejected.wait() == 2 and "this run was trained on different data (58 samples, " in rejected.stderr
    (tmp_path / "a.npz").rename(tmp_path / "moved.npz")
    assert run_fork(tmp_path, *command, "--data-root", "moved.npz").wait() == 0


def test_a_run_that_is_never_evaluated_has_no_metrics_and_its_last_checkpoint_is_the_best(
    tmp_path: Path, tiny: str
) -> None:
    command = ("train", tiny, "--out", "run", "--images", "80", "--set", "evaluate_every=never")
    trained = run_fork(tmp_path, *command, "--set", "validation=0")
    assert trained.wait() == 0, trained.stderr
    assert "evaluate_every=never: this run is not evaluated" in trained.stdout
    names = {name for line in read_metrics(tmp_path / "run") for name in line}
    assert not [name for name in names if name.startswith(("validation/", "test/"))]
    checkpoints = RunFolder(tmp_path / "run").checkpoints
    assert choose_checkpoint(checkpoints, "best").images == choose_checkpoint(checkpoints, "last").images == 80
    evaluated = run_fork(tmp_path, "evaluate", "run", "--trust")
    assert evaluated.wait() == 0 and "top1" in evaluated.stdout


def test_a_checkpoint_without_optimizer_state_can_be_used_but_not_resumed(run: Path, tiny: str) -> None:
    for state in run.glob("checkpoints/*/state.safetensors"):
        state.unlink()
    used = run_fork(run.parent, "evaluate", "run", "--trust")
    assert used.wait() == 0 and "top1" in used.stdout and "damaged" not in used.stdout + used.stderr
    resumed = run_fork(run.parent, "train", tiny, "--out", "run", "--images", "160")
    assert resumed.wait() == 2 and "state.safetensors is missing" in resumed.stderr


def test_a_resumed_run_that_is_no_longer_evaluated_keeps_its_best_checkpoint(run: Path, tiny: str) -> None:
    checkpoints = RunFolder(run).checkpoints
    best = choose_checkpoint(checkpoints, "best").images
    settings = ("--images", "320", "--set", "evaluate_every=never", "--set", "keep=1")
    resumed = run_fork(run.parent, "train", tiny, "--out", "run", *settings)
    assert resumed.wait() == 0, resumed.stderr
    assert choose_checkpoint(checkpoints, "last").images == 320
    assert choose_checkpoint(checkpoints, "best").images == best <= 80


def test_the_last_checkpoint_records_its_evaluation_whatever_the_interval(tmp_path: Path, tiny: str) -> None:
    cadence = ("--set", "evaluate_every=48 images", "--set", "save_every=40 images")
    command = ("train", tiny, "--out", "run", "--images", "80", *cadence)
    for _ in range(2):  # the second command has nothing left to do
        assert run_fork(tmp_path, *command).wait() == 0
        lines = [line for line in read_metrics(tmp_path / "run") if "validation/top1" in line]
        assert [line["images"] for line in lines] == [48, 80]
        highest = max(lines, key=lambda line: (line["validation/top1"], -line["images"]))
        kept = choose_checkpoint(RunFolder(tmp_path / "run").checkpoints, "last")
        assert kept.images == kept.numbers.evaluated_at == 80
        assert kept.best_images == highest["images"]
    assert not list((tmp_path / "run" / "checkpoints").glob(".*"))


def test_an_ema_that_is_never_evaluated_is_rejected(tmp_path: Path, tiny: str) -> None:
    (tmp_path / "plain.py").write_text(
        "from paceline.recipes.classification import Classification\n\n\nclass Plain(Classification):\n    ema = ()\n"
    )
    rejected = run_fork(
        tmp_path, "train", "./plain.py", "--set", "ema_half_life=1 epochs", "--set", "width=2", "--out", "run"
    )
    assert rejected.wait() == 2
    assert "ema_half_life=1 epochs: the recipe does not use EMA weights for 'classifier'" in rejected.stderr
