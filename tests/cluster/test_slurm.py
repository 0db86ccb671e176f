"""Jobs on a real SLURM cluster, even preempted ones, end with the same weights, bit for bit, as on one machine."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest
from holds import Holds
from machines import TINY, ask
from running import Running, start_command, wait_until, weights_of

SETTINGS = ("--set", "save_every=1000 steps", "--set", "holds=holds")


def launch(folder: Path, run: str, *more: str) -> Running:
    words = ("launch", "slurm", TINY, *SETTINGS, "--nodes", "2", "--time", "10:00", "--out", run)
    return start_command(folder, *words, *more)


def tensors(run: Path) -> dict[str, bytes]:
    return {name: content for name, content in weights_of(run).items() if name.endswith(".safetensors")}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """Return the weights of a reference run, trained by two processes on one machine."""
    folder = tmp_path_factory.mktemp("whole")
    running = start_command(folder, "train", TINY, *SETTINGS, "--devices", "2", "--out", "run")
    assert running.wait() == 0, running.stderr
    return tensors(folder / "run")


def test_two_nodes_end_with_weights_bit_identical_to_those_from_two_local_processes(
    slurm: None, whole: dict[str, bytes], tmp_path: Path
) -> None:
    name = 'runs/it\'s 100% "mine" $(touch pwned)'
    running = launch(tmp_path, name, "--wait")
    assert running.wait(300) == 0, running.stdout + running.stderr
    assert "100%" in running.stdout and "completed" in running.stdout
    assert tensors(tmp_path / name) == whole
    assert (tmp_path / name / "launch" / "slurm.sh").exists()
    assert not list(tmp_path.rglob("pwned"))


def test_a_preempted_job_is_requeued_and_ends_with_bit_identical_weights(
    slurm: None, whole: dict[str, bytes], tmp_path: Path
) -> None:
    holds = Holds(tmp_path / "holds")
    holds.hold("loss", after=4)  # two processes check for a stop request after step 7, and then not before step 15
    running = launch(tmp_path, "run", "--wait")
    holds.wait_for("loss", running, num_ranks=2)
    job = re.search(r"^submitted .* as job (\d+)", running.stdout, re.MULTILINE)
    assert job, running.stdout
    subprocess.run(["scancel", "--batch", "--signal=USR1", job[1]], check=True, timeout=30)
    log = tmp_path / "run" / "logs" / "rank-0.txt"
    wait_until(lambda: "received SIGUSR1: saving a checkpoint after this step" in log.read_text(), running)
    holds.release("loss")
    assert running.wait(300) == 0, running.stdout + running.stderr
    assert "saved; run the same command again to resume" in running.stdout
    assert "resuming from" in running.stdout
    assert tensors(tmp_path / "run") == whole


def test_a_cancelled_job_saves_a_checkpoint_and_is_not_requeued(slurm: None, tmp_path: Path) -> None:
    holds = Holds(tmp_path / "holds")
    holds.hold("loss", after=4)
    running = launch(tmp_path, "run", "--wait")
    holds.wait_for("loss", running, num_ranks=2)
    job = re.search(r"^submitted .* as job (\d+)", running.stdout, re.MULTILINE)
    assert job, running.stdout
    subprocess.run(["scancel", job[1]], check=True, timeout=30)
    holds.release("loss")
    assert running.wait(100) != 0
    assert f"job {job[1]}: cancelled" in running.stdout and "requeued" not in running.stdout
    assert list((tmp_path / "run" / "checkpoints").iterdir())
    assert not ask("squeue", "-h")


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (("--partition", "mian"), "unknown partition 'mian'; did you mean 'main'?"),
        (("--nodes", "3"), "--nodes 3: the maximum for this cluster is 2"),
        (("--gpus-per-node", "4"), "--gpus-per-node 4: SLURM lists at most 0 per host"),
    ],
)
def test_unavailable_resources_are_rejected_before_submitting(
    slurm: None, tmp_path: Path, flags: tuple[str, ...], complaint: str
) -> None:
    running = launch(tmp_path, "run", "--submit", *flags)
    assert running.wait() == 2 and complaint in running.stderr
    assert not (tmp_path / "run").exists() and not ask("squeue", "-h")


def test_too_few_ports_for_srun_are_reported(slurm: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tools = tmp_path / "tools"
    tools.mkdir()
    (tools / "scontrol").write_text("#!/bin/sh\necho 'SrunPortRange           = 60001-60003'\n")
    (tools / "scontrol").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")
    running = launch(tmp_path, "run", "--submit")
    assert running.wait() == 2
    assert "srun needs 5 ports, but SLURM's SrunPortRange 60001-60003 has only 3" in running.stderr
