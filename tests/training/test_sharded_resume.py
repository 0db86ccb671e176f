"""A checkpoint of a sharded run resumes on any number of processes, and is as safe as any other checkpoint."""

from __future__ import annotations

import random
import signal
import time
from collections import Counter
from pathlib import Path

import pytest
import safetensors.torch
from holds import start_until
from ranks import difference
from running import kill_together, metrics_without_times, run_fork, run_ranks, start_ranks, wait_until, weights_of

from paceline.runs.checkpoint import Checkpoints, is_whole

BLOCKY = str(Path(__file__).parents[1] / "blocky.py")
EXACT = ("--precision", "fp64", "--set", "optimizer=adam", "--set", "ema_half_life=60 images", "--set", "width=5")
CONSTANT = ("--set", "schedule=constant", "--set", "norm=none")  # independent of the length of the run and of rounding
SHORT = ("--batch-size", "12", "--set", "save_every=4 steps", "--set", "evaluate_every=100 steps")


def last_tensors(run: Path) -> dict[str, dict]:
    folder = Checkpoints(run / "checkpoints").path(Checkpoints(run / "checkpoints").all()[-1])
    names = ("weights.safetensors", "state.safetensors")
    return {name: safetensors.torch.load_file(folder / name) for name in names}


def seen_samples(folder: Path) -> Counter[int]:
    return Counter(int(word) for file in folder.iterdir() for word in file.read_text().split())


def test_a_sharded_run_that_is_killed_ends_with_the_same_bits_after_resuming(tmp_path: Path) -> None:
    command = ("train", BLOCKY, "--strategy", "fsdp", "--accelerator", "cpu")
    assert run_ranks(tmp_path, 2, *command, "--out", "whole") == [0, 0]
    run = tmp_path / "killed"
    ranks = start_until(tmp_path, 2, 132, *command, "--out", "killed")
    wait_until(lambda: Checkpoints(run / "checkpoints").all()[-1:] >= [96], ranks[0])
    kill_together(ranks)
    assert [rank.wait() for rank in ranks] == [-signal.SIGKILL] * 2
    assert run_ranks(tmp_path, 2, *command, "--out", "killed") == [0, 0]
    assert weights_of(run) == weights_of(tmp_path / "whole")
    assert metrics_without_times(run) == metrics_without_times(tmp_path / "whole")
    assert not list((run / "checkpoints").glob(".*"))


@pytest.mark.slow
def test_a_sharded_run_killed_ten_times_ends_with_the_same_bits(tmp_path: Path) -> None:
    chance = random.Random(0)
    command = ("train", BLOCKY, "--strategy", "fsdp", "--accelerator", "cpu", "--set", "save_every=1 steps")
    assert run_ranks(tmp_path, 2, *command, "--out", "whole") == [0, 0]
    checkpoints, kills = Checkpoints(tmp_path / "killed" / "checkpoints"), 0
    while kills < 10:
        ranks = start_ranks(tmp_path, 2, *command, "--out", "killed")
        before = checkpoints.all()[-1:]
        wait_until(lambda before=before: checkpoints.all()[-1:] > before, ranks[0])
        time.sleep(chance.uniform(0, 0.02))
        chance.choice(ranks).kill()  # the other rank notices
        kills += sum(rank.wait() == -signal.SIGKILL for rank in ranks)
        if checkpoints.all()[-1] == 240:
            break
    assert run_ranks(tmp_path, 2, *command, "--out", "killed") == [0, 0]
    assert weights_of(tmp_path / "killed") == weights_of(tmp_path / "whole")


@pytest.mark.slow
def test_a_run_moves_between_sharded_replicated_and_single_training(tmp_path: Path, tiny: str) -> None:
    command = ("train", tiny, "--accelerator", "cpu", *EXACT, *CONSTANT, *SHORT)
    for images, strategy, size in ((96, "fsdp", 2), (192, "ddp", 3), (240, "single", 1), (336, "fsdp", 2)):
        flags = ("--strategy", strategy, "--images", str(images), "--set", f"record={tmp_path}/moved-samples")
        assert run_ranks(tmp_path, size, *command, *flags, "--out", "moved") == [0] * size
    flags = ("--strategy", "single", "--images", "336", "--set", f"record={tmp_path}/stayed-samples")
    assert run_fork(tmp_path, *command, *flags, "--out", "stayed").wait() == 0
    moved, stayed = last_tensors(tmp_path / "moved"), last_tensors(tmp_path / "stayed")
    for name in moved:
        assert difference(moved[name], stayed[name]) < 1e-9
    assert seen_samples(tmp_path / "moved-samples") == seen_samples(tmp_path / "stayed-samples")
    for checkpoint in (tmp_path / "moved" / "checkpoints").iterdir():
        assert is_whole(checkpoint)


def test_a_flipped_bit_in_a_sharded_checkpoint_is_noticed(tmp_path: Path, tiny: str) -> None:
    command = ("train", tiny, "--accelerator", "cpu", "--strategy", "fsdp", "--images", "48", *SHORT)
    assert run_ranks(tmp_path, 2, *command, "--out", "run") == [0, 0]
    checkpoint = max((tmp_path / "run" / "checkpoints").iterdir())
    assert is_whole(checkpoint)
    for name in ("weights.safetensors", "state.safetensors"):
        intact = (checkpoint / name).read_bytes()
        (checkpoint / name).write_bytes(intact[:-1] + bytes([intact[-1] ^ 1]))
        assert not is_whole(checkpoint)
        (checkpoint / name).write_bytes(intact)
    assert is_whole(checkpoint)
