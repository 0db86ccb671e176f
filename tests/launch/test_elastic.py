"""Killed worker processes are restarted, and all listen only on localhost."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from holds import Holds
from listeners import listeners
from running import (
    free_port,
    run_fork,
    run_ranks,
    start_fork,
    wait_until,
    weights_of,
    workers_of,
)

from paceline.config.settings import RunSettings
from paceline.core.errors import UserError
from paceline.launch.rendezvous import Rendezvous
from paceline.runs.checkpoint import Checkpoints

TINY = str(Path(__file__).resolve().parent.parent / "tiny.py")


@pytest.fixture
def holds(tmp_path: Path) -> Holds:
    """Hold every run in its seventh step."""
    holds = Holds(tmp_path / "holds")
    holds.hold("loss", after=6)
    return holds


def test_a_killed_process_is_restarted_and_the_final_weights_are_bit_identical(tmp_path: Path, holds: Holds) -> None:
    run = tmp_path / "run"
    command = ("train", TINY, "--devices", "2", *holds.settings)
    running = start_fork(tmp_path, *command, "--max-restarts", "1", "--out", str(run))
    holds.wait_for("loss", running, num_ranks=2)
    wait_until(lambda: Checkpoints(run / "checkpoints").all(), running)
    ranks = workers_of(running.pid)
    found = set().union(*map(listeners, [running.pid, *ranks.values()]))
    assert len(found) >= 3, "expected the stores of the launcher and of rank 0, and the process group"
    assert {address for address, _ in found} == {"127.0.0.1"}
    os.kill(ranks[1], signal.SIGKILL)
    holds.release("loss")
    assert running.wait() == 0, running.stderr
    assert "rank 1 was killed by signal 9; restarting from the last checkpoint (restarts left: 0)" in running.stderr
    assert "resuming from" in running.stdout
    assert run_ranks(tmp_path, 2, *command, "--out", str(tmp_path / "whole")) == [0, 0]
    assert weights_of(run) == weights_of(tmp_path / "whole")


def test_training_with_torchrun_works(tmp_path: Path) -> None:
    """Under torchrun, the agent hosts the rendezvous store, and Paceline's ranks connect to the store."""
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "paceline"]
    done = subprocess.run(
        [sys.executable, *words, "train", TINY, "--images", "96", "--out", str(tmp_path / "run")],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    assert "batch 16 = 2 devices" in done.stdout


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"nnodes": "two"}, "--nnodes two"),
        ({"nnodes": "3:2", "rdzv": "127.0.0.1:29400"}, "--nnodes 3:2"),
        ({"nnodes": "2"}, "set --rdzv HOST:PORT"),
        ({"nnodes": "2", "rdzv": "127.0.0.1"}, "--rdzv 127.0.0.1"),
        ({"nnodes": "2", "rdzv": "127.0.0.1:80"}, "--rdzv 127.0.0.1:80"),
        ({"nnodes": "2", "rdzv": "a..b:29400"}, "--rdzv a..b:29400: not a host name"),
        ({"nnodes": "2", "rdzv": "no.such.host.invalid:29400"}, "--rdzv no.such.host.invalid:29400"),
        ({"nnodes": "1:2", "rdzv": "127.0.0.1:29400", "batch_size": "4/device"}, "--batch-size 4/device"),
    ],
)
def test_invalid_rendezvous_options_are_rejected(settings: dict[str, str], complaint: str) -> None:
    with pytest.raises(UserError) as error:
        Rendezvous.of(RunSettings(**settings))  # type: ignore[arg-type]
    assert complaint in str(error.value)


def test_a_host_that_no_other_host_joins_times_out_with_a_one_line_error(tmp_path: Path) -> None:
    address = f"127.0.0.1:{free_port()}"
    words = ("--nnodes", "2", "--rdzv", address, "--set", "join_timeout=2", "--out", "run")
    running = run_fork(tmp_path, "train", TINY, *words)
    assert running.wait() == 1
    assert f"fewer than 2 hosts (--nnodes) joined at {address} within 2 s" in running.stderr
    assert "Traceback" not in running.stderr
