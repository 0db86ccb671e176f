"""Killed runs of r3gan end with the same bits, including the augmentation strength and the schedules."""

from __future__ import annotations

import random
import shutil
import time
from pathlib import Path

import pytest
from running import run_fork, run_ranks, start_fork, start_ranks, weights_of

from paceline.runs.checkpoint import Checkpoints

pytestmark = [pytest.mark.torture, pytest.mark.timeout(900)]

SETTINGS = (
    *("nz=8", "width=8", "num_blocks=1", "group_size=4", "size=16", "penalty_every=2"),
    *("ada=blit,geometry,color", "ada_images=400", "ada_target=0", "burn_in=50%", "ema_half_life=64 images"),
    *("save_every=32 images", "evaluate_every=100 epochs", "sample_every=100 epochs", "few_images=allow"),
)
COMMAND = ("train", "r3gan", "--accelerator", "cpu", "--batch-size", "16", "--images", "640", "--lr", "1e-3")


def command(devices: int) -> list[str]:
    return [*COMMAND, "--devices", str(devices), *(word for one in SETTINGS for word in ("--set", one))]


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with uninterrupted runs of one and of two processes."""
    folder = tmp_path_factory.mktemp("references")
    assert run_fork(folder, *command(1), "--out", "1").wait() == 0
    assert run_ranks(folder, 2, *command(2), "--out", "2") == [0, 0]
    return folder


def state_of(run: Path) -> dict[str, bytes]:
    """Return the optimizer state and the signals of the last checkpoint."""
    last = Checkpoints(run / "checkpoints").latest(pytest.fail)
    assert last is not None
    state = last.state
    assert state["signals/augment_strength"] > 0
    return {name: tensor.numpy().tobytes() for name, tensor in state.items()}


@pytest.mark.parametrize("number", range(10))
def test_a_killed_run_ends_with_the_same_bits(number: int, tmp_path: Path, references: Path) -> None:
    chance, devices, run = random.Random(number), 1 + number % 2, tmp_path / "run"
    for _ in range(chance.choice((1, 2, 3))):
        wanted = chance.randrange(1, 500)
        words = (*command(devices), "--out", "run")
        running = [start_fork(tmp_path, *words)] if devices == 1 else start_ranks(tmp_path, 2, *words)
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline and max(Checkpoints(run / "checkpoints").all(), default=0) < wanted:
            time.sleep(0.01)
        time.sleep(chance.random() * 0.1)
        for one in running:
            one.kill()
        for one in running:
            one.wait()
    if devices == 1:
        assert run_fork(tmp_path, *command(1), "--out", "run").wait() == 0
    else:
        assert run_ranks(tmp_path, 2, *command(2), "--out", "run") == [0, 0]
    assert weights_of(run) == weights_of(references / str(devices))
    assert state_of(run) == state_of(references / str(devices))
    shutil.rmtree(run)
