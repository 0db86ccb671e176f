"""Ranks started by torchrun, srun or a script report which other rank ended instead of waiting for it."""

from __future__ import annotations

import os
import signal
import socket
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist
from running import Running, start_function_in_ranks, start_ranks, wait_until

from paceline.parallel import group as peers
from paceline.runs.status import Status

SHORT = ("--images", "64", "--strategy", "ddp", "--accelerator", "cpu")


def one_line(running: Running) -> str:
    assert len(running.stderr.splitlines()) == 1, running.stderr
    return running.stderr


def train_unless_absent(absent: int, words: tuple[str, ...]) -> int:
    from paceline.cli.app import run

    return 0 if int(os.environ["RANK"]) == absent else run(list(words))


def test_the_error_names_a_rank_that_never_starts(tmp_path: Path, tiny: str) -> None:
    words = ("train", tiny, *SHORT, "--set", "start_timeout=6", "--out")
    groups = [start_function_in_ranks(tmp_path, 3, train_unless_absent, n, (*words, f"run-{n}")) for n in (0, 1)]
    for absent, ranks in enumerate(groups):
        for rank, running in enumerate(ranks):
            if rank != absent:
                assert running.wait() == 2
                assert f"rank {absent} did not start within 6 s (start_timeout)" in one_line(running)


def train_with_a_wrong_path(wrong: int, words: tuple[str, ...]) -> int:
    from paceline.cli.app import run

    return run([*words, *(("--data-root", "missing") if int(os.environ["RANK"]) == wrong else ())])


@pytest.mark.parametrize("wrong", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_a_rank_that_cannot_open_its_data_is_named_by_the_others(tmp_path: Path, tiny: str, wrong: int) -> None:
    words = ("train", tiny, *SHORT, "--data", "folder", "--data-root", "images", "--out", "run", "--set", "size=8")
    from PIL import Image

    for kind in ("a", "b"):
        (tmp_path / "images" / kind).mkdir(parents=True)
        for number in range(20):
            Image.new("RGB", (8, 8), (number, 0, 0)).save(tmp_path / "images" / kind / f"{number}.png")
    ranks = start_function_in_ranks(tmp_path, 2, train_with_a_wrong_path, wrong, words)
    assert [running.wait() for running in ranks] == [2, 2]
    assert "missing" in one_line(ranks[wrong])
    assert f"rank {wrong} ended" in one_line(ranks[1 - wrong])


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_rank_is_named_by_the_others(tmp_path: Path, tiny: str, victim: int) -> None:
    words = ("train", tiny, *SHORT, "--images", "1600000", "--out", "run")
    ranks = start_ranks(tmp_path, 2, *words)
    wait_until(lambda: (tmp_path / "run" / "status.json").exists(), ranks[0])
    time.sleep(3 * peers.BEAT_SECONDS)  # the ranks have reported an operation
    ranks[victim].kill(signal.SIGKILL)
    other = ranks[1 - victim]
    assert other.wait() == 2
    if victim:
        assert f"rank {victim} ended" in one_line(other)
        status = Status.of(tmp_path / "run")
        assert status and status.state == "failed" and f"rank {victim} ended" in status.reason
        assert ", last seen after '" in status.reason
    else:
        assert "rank 0 ended" in (tmp_path / "run" / "logs" / "rank-1.txt").read_text() + other.stderr


def hang_or_fail() -> int:
    """Simulate an NCCL collective operation, which keeps waiting for a lost rank."""
    from paceline.config.settings import RunSettings
    from paceline.core.errors import UserError
    from paceline.parallel import group as peers
    from paceline.parallel.world import join

    peers.GRACE_SECONDS = 0.5
    world = join(RunSettings(accelerator="cpu"), distributed=True)
    with world.reporting():
        if world.is_first:
            time.sleep(3600)
        raise UserError("no such folder")


def test_a_rank_that_hangs_after_another_rank_failed_exits(tmp_path: Path) -> None:
    first, second = start_function_in_ranks(tmp_path, 2, hang_or_fail)
    assert first.wait() == 2
    assert one_line(first) == "paceline: rank 1 ended: no such folder\n"
    assert second.wait() == 1


def test_a_rank_that_has_not_noticed_a_hang_yet_is_not_reported_as_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "GRACE_SECONDS", 60.0)  # the first rank must not end this process
    monkeypatch.setattr(peers, "EXAMINATION_SECONDS", 60.0)  # the first rank may answer late
    limit = timedelta(seconds=60)
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=limit)
    ranks = [
        peers.Peers(
            dist.TCPStore("127.0.0.1", server.port, is_master=False, wait_for_workers=False, timeout=limit),
            socket.create_connection(("127.0.0.1", server.port)),
            rank,
            2,
        )
        for rank in range(2)
    ]
    try:
        assert ranks[1].examine("no progress for 600 s") == "no progress for 600 s"
    finally:
        ranks[0].leave()
        ranks[0].join()
