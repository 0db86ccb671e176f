"""A killed run that is resumed ends with the same weights, bit for bit, as an uninterrupted run."""

from __future__ import annotations

import os
import re
import signal
from contextlib import suppress
from pathlib import Path

import pytest
from holds import Holds
from running import (
    Running,
    kill_together,
    metrics_without_times,
    processes_naming,
    run_fork,
    run_ranks,
    start_command,
    start_fork,
    start_ranks,
    wait_until,
    weights_of,
    workers_of,
)


@pytest.fixture
def holds(tmp_path: Path) -> Holds:
    return Holds(tmp_path / "holds")


def checkpoints(run: Path) -> list[int]:
    folder = run / "checkpoints"
    return sorted(int(entry.name) for entry in folder.iterdir() if entry.name.isdigit()) if folder.is_dir() else []


def is_saving(run: Path) -> bool:
    return any((run / "checkpoints").glob(".writing-*"))


def has_trained(run: Path, images: int) -> bool:
    metrics = run / "metrics.jsonl"
    return metrics.exists() and any(f'"images": {images},' in line for line in metrics.read_text().splitlines())


def not_inherited(run: Path) -> list[int]:
    """Return the run's processes that are still alive after a while."""
    try:
        wait_until(lambda: not processes_naming(str(run)), seconds=30)
    except AssertionError:
        return processes_naming(str(run))
    return []


def assert_same_end(run: Path, reference: Path) -> None:
    assert checkpoints(run)[-1] == checkpoints(reference)[-1]
    assert weights_of(run) == weights_of(reference), "the resumed run ended with other bits"
    assert metrics_without_times(run) == metrics_without_times(reference)


def test_a_single_process_killed_twice_ends_with_the_same_weights_and_metrics(
    tmp_path: Path, tiny: str, holds: Holds
) -> None:
    command = ("train", tiny, *holds.settings, "--set", "dropout=0.2")
    assert run_fork(tmp_path, *command, "--out", "whole").wait() == 0
    run = tmp_path / "killed"
    holds.hold("loss", after=9)
    first = start_fork(tmp_path, *command, "--out", "killed")
    holds.wait_for("loss", first)
    wait_until(lambda: checkpoints(run), first)
    first.kill()
    assert first.wait() == -signal.SIGKILL and has_trained(run, 144)
    holds.release("loss")
    holds.hold("save")
    before = checkpoints(run)
    second = start_fork(tmp_path, *command, "--out", "killed")
    holds.wait_for("save", second)
    assert is_saving(run)
    second.kill()
    assert second.wait() == -signal.SIGKILL and checkpoints(run) == before
    holds.release("save")
    last = run_fork(tmp_path, *command, "--out", "killed")
    assert last.wait() == 0 and "resuming from" in last.stdout
    assert_same_end(run, tmp_path / "whole")
    assert not list((run / "checkpoints").glob(".*")), "the interrupted save was not swept"


def test_a_kill_between_the_last_evaluation_and_its_checkpoint_writes_no_metrics_line_twice(
    tmp_path: Path, tiny: str, holds: Holds
) -> None:
    # The last step saves a checkpoint, which is saved again with the result of its evaluation.
    command = ("train", tiny, *holds.settings, "--images", "80")
    assert run_fork(tmp_path, *command, "--out", "whole").wait() == 0
    run = tmp_path / "killed"
    holds.hold("loss", after=4)
    running = start_fork(tmp_path, *command, "--out", "killed")
    holds.wait_for("loss", running)
    holds.hold("prediction")
    holds.release("loss")
    wait_until(lambda: checkpoints(run) == [80], running)
    holds.hold("save")
    holds.release("prediction")
    holds.wait_for("save", running)
    assert "validation/" in (run / "metrics.jsonl").read_text()
    running.kill()
    assert running.wait() == -signal.SIGKILL
    holds.release("save")
    assert run_fork(tmp_path, *command, "--out", "killed").wait() == 0
    assert_same_end(run, tmp_path / "whole")


def test_restarting_a_finished_run_changes_nothing(tmp_path: Path, tiny: str) -> None:
    command = ("train", tiny, "--out", "run", "--images", "96")
    assert run_fork(tmp_path, *command).wait() == 0
    before = metrics_without_times(tmp_path / "run"), weights_of(tmp_path / "run")
    assert run_fork(tmp_path, *command).wait() == 0
    assert (metrics_without_times(tmp_path / "run"), weights_of(tmp_path / "run")) == before


@pytest.mark.slow
def test_two_processes_resume_after_the_launcher_or_a_rank_is_killed(tmp_path: Path, tiny: str, holds: Holds) -> None:
    command = ("train", tiny, *holds.settings, "--devices", "2", "--set", "dropout=0.2")
    assert run_ranks(tmp_path, 2, *command, "--out", "whole") == [0, 0]
    run = tmp_path / "killed"
    for target, kind, num_ranks in (("launcher", "loss", 2), ("1", "loss", 2), ("0", "save", 1)):
        holds.hold(kind, after=6 if kind == "loss" else 0)
        running = start_command(tmp_path, *command, "--out", str(run))
        holds.wait_for(kind, running, num_ranks)
        kill(running, target)
        holds.release(kind)
        assert running.wait() != 0
        assert not not_inherited(run)
    assert start_command(tmp_path, *command, "--out", str(run)).wait() == 0
    assert_same_end(run, tmp_path / "whole")


def kill(running: Running, target: str) -> None:
    """Kill the launcher or one rank's process with SIGKILL, unless the process has ended."""
    process = running.pid if target == "launcher" else workers_of(running.pid).get(int(target))
    if process and not running.ended:
        with suppress(ProcessLookupError):  # it has ended in the meantime
            os.kill(process, signal.SIGKILL)


def test_a_run_resumed_with_two_and_then_three_processes_sees_the_same_samples(tmp_path: Path, tiny: str) -> None:
    command = ("train", tiny, "--batch-size", "20", "--set", "save_every=1 steps", "--set", "keep=40")
    assert run_fork(tmp_path, *command, "--images", "300", "--out", "whole", "--set", "record=whole-seen").wait() == 0
    run = tmp_path / "moved"
    for devices, images in ((1, 100), (2, 200), (3, 300)):
        sizes = ("--devices", str(devices), "--images", str(images))
        assert set(run_ranks(tmp_path, devices, *command, *sizes, "--out", str(run), "--set", "record=seen")) == {0}
    seen = [sample for size in (1, 2, 3) for sample in samples_in_order(tmp_path / "seen", size)]
    assert len(seen) == 300
    assert seen == samples_in_order(tmp_path / "whole-seen", 1)


def samples_in_order(folder: Path, size: int) -> list[int]:
    """Return the sample indices from all ranks in training order."""
    ranks = [(folder / f"rank-{rank}-of-{size}").read_text().splitlines() for rank in range(size)]
    return [int(sample) for step in zip(*ranks, strict=True) for part in step for sample in part.split()]


@pytest.mark.parametrize(
    "settings",
    [
        "optimizer=adam dropout=0.3 ema_half_life=100_images",
        "optimizer=adamw precision=bf16 accumulate=3 clip=0.5 norm=none ema_half_life=64_images",
        "optimizer=sgd precision=fp16 clip=1 dropout=0.1 loader=workers workers=1",
    ],
)
def test_a_run_resumes_exactly_with_any_optimizer_precision_ema_and_dropout(
    tmp_path: Path, tiny: str, holds: Holds, settings: str
) -> None:
    chosen = [word for pair in settings.split() for word in ("--set", pair.replace("_images", " images"))]
    command = ("train", tiny, *holds.settings, *chosen, "--images", "240")
    assert run_fork(tmp_path, *command, "--out", "whole").wait() == 0
    holds.hold("loss", after=9 * num_micro_batches(settings))
    running = start_fork(tmp_path, *command, "--set", "out=killed")
    wait_until(lambda: checkpoints(tmp_path / "killed"), running)
    holds.wait_for("loss", running)
    running.kill()
    assert running.wait() == -signal.SIGKILL and has_trained(tmp_path / "killed", 144)
    holds.release("loss")
    assert run_fork(tmp_path, *command, "--out", "killed").wait() == 0
    assert_same_end(tmp_path / "killed", tmp_path / "whole")


def num_micro_batches(settings: str) -> int:
    found = re.search(r"accumulate=(\d+)", settings)
    return int(found[1]) if found else 1


def test_ranks_without_a_launcher_resume_after_a_kill(tmp_path: Path, tiny: str, holds: Holds) -> None:
    """Ranks started by torchrun, srun or Kubernetes run without Paceline's launcher."""
    command = ("train", tiny, *holds.settings, "--devices", "2")
    assert run_ranks(tmp_path, 2, *command, "--out", "whole") == [0, 0]
    holds.hold("loss", after=7)
    ranks = start_ranks(tmp_path, 2, *command, "--out", "killed")
    wait_until(lambda: checkpoints(tmp_path / "killed"), ranks[0])
    holds.wait_for("loss", ranks[0], num_ranks=2)
    kill_together(ranks)
    assert [rank.wait() for rank in ranks] == [-signal.SIGKILL] * 2
    holds.release("loss")
    assert run_ranks(tmp_path, 2, *command, "--out", "killed") == [0, 0]
    assert_same_end(tmp_path / "killed", tmp_path / "whole")


@pytest.mark.parametrize("strategy", ["ddp", pytest.param("lightning", marks=pytest.mark.slow)])
def test_three_processes_resume_and_end_with_bit_identical_weights(tmp_path: Path, tiny: str, strategy: str) -> None:
    # With three ranks, the order of summation depends on a gradient's position in its bucket.
    fixed = ("--set", "width=32", "--set", "validation=0", "--set", "schedule=constant")
    command = ("train", tiny, "--strategy", strategy, *fixed)
    for out, lengths in (("whole", ["96"]), ("parts", ["48", "96"])):
        for images in lengths:
            assert run_ranks(tmp_path, 3, *command, "--images", images, "--out", out) == [0, 0, 0]
    assert weights_of(tmp_path / "parts") == weights_of(tmp_path / "whole")
