"""If the best checkpoint is damaged or missing, this is reported, and the run and its commands still work."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from holds import Holds
from running import run_fork, start_fork, start_ranks

from paceline.runs.checkpoint import Checkpoints, choose_checkpoint
from paceline.runs.metrics import read_metrics
from paceline.runs.status import Status

# The best checkpoint is the first that is evaluated, because the number of samples never changes.
CODE = """
import sys
sys.path.insert(0, {folder!r})
from tiny import Evaluation, Tiny

class FirstIsBest(Tiny):
    evaluation = Evaluation("accuracy", best="validation/count")
"""
TRAIN = ("train", "./first.py", "--out", "run", "--accelerator", "cpu", "--set", "schedule=constant")
BEST = Path("run", "checkpoints", "000000000128")
DAMAGED = f"the best checkpoint {BEST} is damaged (weights.safetensors does not match its recorded SHA-256)"
MISSING = f"the best checkpoint {BEST} is missing"


def truncate_weights(checkpoint: Path) -> None:
    os.truncate(checkpoint / "weights.safetensors", 100)


def checkpoints_in(folder: Path) -> Checkpoints:
    return Checkpoints(folder / "run" / "checkpoints")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "first.py").write_text(CODE.format(folder=str(Path(__file__).parent.parent)))
    return tmp_path


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose best checkpoint is not its last one."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "first.py").write_text(CODE.format(folder=str(Path(__file__).parent.parent)))
    done = run_fork(folder, *TRAIN, "--images", "240")
    assert done.wait() == 0, done.stderr
    assert choose_checkpoint(checkpoints_in(folder), "best").images == 128
    return folder / "run"


@pytest.fixture
def trained(run: Path, folder: Path) -> Path:
    """A folder with a copy of the run."""
    shutil.copytree(run, folder / "run")
    return folder


@pytest.mark.parametrize(
    ("num_devices", "strategy", "harm", "line"),
    [
        (1, "single", shutil.rmtree, MISSING),
        (2, "ddp", truncate_weights, DAMAGED),
        pytest.param(2, "fsdp", truncate_weights, DAMAGED, marks=pytest.mark.slow),
    ],
)
def test_a_resumed_run_reports_an_unusable_best_checkpoint_and_chooses_a_new_one(
    trained: Path, harm: Callable[[Path], None], line: str, num_devices: int, strategy: str
) -> None:
    harm(trained / BEST)
    longer = (*TRAIN, "--images", "480", "--devices", str(num_devices), "--strategy", strategy)
    ranks = start_ranks(trained, num_devices, *longer)
    assert [rank.wait() for rank in ranks] == [0] * num_devices, [rank.stderr for rank in ranks]
    reported = [one for rank in ranks for one in rank.stdout.splitlines() if "the best checkpoint" in one]
    assert reported == [f"{line}; the last one counts as the best until the next evaluation"]
    kept = checkpoints_in(trained)
    assert choose_checkpoint(kept, "best").images == 256 and 128 not in kept.all()
    assert (trained / BEST).with_name(f"damaged-{BEST.name}").exists() == (harm is truncate_weights)
    assert read_metrics(trained / "run")[-1]["test/checkpoint_images"] == 256


def test_a_finished_run_whose_best_checkpoint_is_damaged_stays_finished(trained: Path) -> None:
    truncate_weights(trained / BEST)
    for line in (DAMAGED, MISSING):  # the damaged checkpoint is set aside
        again = run_fork(trained, *TRAIN, "--images", "240")
        assert again.wait() == 0, again.stderr
        assert line in again.stdout and "test metrics for the checkpoint at 240 images" in again.stdout
        status = Status.of(trained / "run")
        assert status and status.state == "finished"


def test_a_best_checkpoint_that_is_damaged_during_training_is_replaced_by_the_last_one(folder: Path) -> None:
    holds = Holds(folder / "holds")
    holds.hold("loss", after=10)
    running = start_fork(folder, *TRAIN, "--images", "240", *holds.settings)
    holds.wait_for("loss", running)
    truncate_weights(folder / BEST)
    holds.release("loss")
    assert running.wait() == 0, running.stderr
    assert f"{DAMAGED}; evaluating the last one instead, at 240 images" in running.stdout
    assert "test metrics for the checkpoint at 240 images" in running.stdout


def test_a_best_checkpoint_without_optimizer_state_stays_the_best(trained: Path) -> None:
    (trained / BEST / "state.safetensors").unlink()
    longer = run_fork(trained, *TRAIN, "--images", "480")
    assert longer.wait() == 0, longer.stderr
    assert "test metrics for the checkpoint at 128 images" in longer.stdout


def test_commands_use_the_last_checkpoint_if_the_best_one_is_unusable(trained: Path) -> None:
    for harm, line in ((truncate_weights, DAMAGED), (shutil.rmtree, MISSING)):
        harm(trained / BEST)
        evaluated = run_fork(trained, "evaluate", "run", "--trust")
        assert evaluated.wait() == 0, evaluated.stderr
        assert f"{line}; using the last one, at 240 images" in evaluated.stdout and "top1" in evaluated.stdout


@pytest.mark.parametrize("devices", ["1", pytest.param("2", marks=pytest.mark.slow)])
def test_evaluate_reports_a_damaged_last_checkpoint_once(trained: Path, devices: str) -> None:
    truncate_weights(trained / "run" / "checkpoints" / "000000000240")
    evaluated = run_fork(trained, "evaluate", "run", "--trust", "--accelerator", "cpu", "--devices", devices)
    assert evaluated.wait() == 0, evaluated.stderr
    assert evaluated.stdout.count("; using the previous one") == 1, evaluated.stdout
    chosen = run_fork(trained, "evaluate", "run", "--trust", "--accelerator", "cpu", "--checkpoint", "128")
    assert chosen.wait() == 0 and "damaged" not in chosen.stdout, chosen.stdout + chosen.stderr
