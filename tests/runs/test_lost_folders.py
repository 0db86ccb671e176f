"""Removed folders, invalid names and killed processes cause a one-line error."""

from __future__ import annotations

import errno
import os
import shutil
import signal
from contextlib import suppress
from pathlib import Path

import pytest
from holds import Holds
from running import run_fork, start_command, start_fork, start_function_in_ranks, wait_until, workers_of

from paceline.core.watch import is_child
from paceline.runs.status import Status

ENDLESSLY = ("--images", "16000000", "--set", "save_every=2 steps", "--set", "loggers=")


def children_of(parent: int) -> list[int]:
    found = []
    for task in Path(f"/proc/{parent}/task").iterdir():
        with suppress(OSError):  # the thread may have ended in the meantime
            found += [int(word) for word in (task / "children").read_text().split()]
    return found


def has_saved(run: Path) -> bool:
    return any((run / "checkpoints").glob("0*"))


def test_removing_the_run_folder_ends_the_run_with_a_one_line_error(tmp_path: Path, tiny: str) -> None:
    run = tmp_path / "run"
    running = start_fork(tmp_path, "train", tiny, *ENDLESSLY, "--out", "run")
    wait_until(lambda: has_saved(run), running)
    run.rename(tmp_path / "moved")
    shutil.rmtree(tmp_path / "moved", ignore_errors=True)  # the run may be removing an old checkpoint, too
    assert running.wait() == 2
    assert len(running.stderr.splitlines()) == 1, running.stderr
    during_a_save = "cannot write checkpoint run/checkpoints/" in running.stderr
    assert during_a_save or "--out run: the folder was removed" in running.stderr
    assert not run.exists(), "it was created again"


def train_until_a_folder_is_replaced(tiny: str, replaced: str) -> int:
    """Train, and replace a folder in the run folder with a link right after the second checkpoint."""
    from paceline.cli.app import run
    from paceline.runs.checkpoint import Checkpoints

    prune, saves = Checkpoints.prune, iter(range(1, 10**9))

    def replace(self: Checkpoints, keep: int, best: int | None) -> None:
        prune(self, keep, best)
        if next(saves) == 2:
            folder = max(Path("run").glob("checkpoints/0*")) if replaced == "newest" else Path("run", replaced)
            folder.rename("moved")
            folder.symlink_to(Path("outside").absolute())

    Checkpoints.prune = replace  # type: ignore[method-assign]
    return run(["train", tiny, *ENDLESSLY, "--out", "run"])


@pytest.mark.parametrize("replaced", ["checkpoints", "newest", "logs"])
def test_a_run_does_not_write_through_a_link_that_replaces_a_folder_in_it(
    tmp_path: Path, tiny: str, replaced: str
) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "precious").touch()
    (running,) = start_function_in_ranks(tmp_path, 1, train_until_a_folder_is_replaced, tiny, replaced)
    assert running.wait() == 2
    assert len(running.stderr.splitlines()) == 1, running.stderr
    assert "is a symbolic link that points outside the run folder; remove the link" in running.stderr
    assert [path.name for path in (tmp_path / "outside").iterdir()] == ["precious"]


def train_until_the_folder_is_lost(tiny: str) -> int:
    """Train, and remove the run folder when the run removes an old checkpoint."""
    from paceline.cli.app import run

    rename = Path.rename

    def lose(path: Path, target: Path) -> Path:
        if target.name.startswith(".removing-"):
            shutil.rmtree("run")
        return rename(path, target)

    Path.rename = lose  # type: ignore[method-assign,assignment]
    return run(["train", tiny, *ENDLESSLY, "--out", "run"])


def test_a_run_folder_that_is_lost_while_an_old_checkpoint_is_removed_is_reported(tmp_path: Path, tiny: str) -> None:
    (running,) = start_function_in_ranks(tmp_path, 1, train_until_the_folder_is_lost, tiny)
    assert running.wait() == 2
    assert running.stderr == (
        "paceline: --out run: the folder was removed or replaced during the run; start the run again\n"
    )


def train_on_a_failing_disk(tiny: str, function: str, calls: int) -> int:
    """Train, with an error of the disk at one of the calls of a function in `os`."""
    from paceline.cli.app import run

    working, count = getattr(os, function), iter(range(1, 10**9))

    def fail(*arguments: object, **options: object) -> object:
        if next(count) == calls:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return working(*arguments, **options)

    setattr(os, function, fail)
    return run(["train", tiny, *ENDLESSLY, "--out", "run"])


@pytest.mark.parametrize(("function", "calls"), [("fsync", 4), ("replace", 1)])
def test_an_error_of_the_disk_is_reported_in_one_line(tmp_path: Path, tiny: str, function: str, calls: int) -> None:
    (running,) = start_function_in_ranks(tmp_path, 1, train_on_a_failing_disk, tiny, function, calls)
    assert running.wait() == 2
    assert running.stderr.startswith("paceline: --out run: Input/output error; ") and running.stderr.count("\n") == 1


def test_an_invalid_folder_name_is_rejected_in_one_line(tmp_path: Path, tiny: str) -> None:
    train = ("train", tiny, "--out")
    for *command, name in (
        (*train, "x" * 300),
        (*train, "a\0b"),
        ("train", tiny, "--devices", "2", "--out", "/".join(["y" * 200] * 25)),
        ("evaluate", "a\0b"),
    ):
        rejected = run_fork(tmp_path, *command, name)
        assert rejected.wait() == 2 and len(rejected.stderr.splitlines()) == 1, rejected.stderr


@pytest.mark.parametrize("devices", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_killed_loader_process_ends_the_run_with_a_one_line_error(tmp_path: Path, tiny: str, devices: int) -> None:
    command = ("train", tiny, *ENDLESSLY, "--set", "loader=workers", "--set", "workers=1", "--out", "run")
    start = start_fork if devices == 1 else start_command
    running = start(tmp_path, *command, "--devices", str(devices))
    wait_until(lambda: has_saved(tmp_path / "run"), running)
    parent = running.pid if devices == 1 else workers_of(running.pid)[1]
    victim = children_of(parent)[0]
    os.kill(victim, signal.SIGKILL)
    assert running.wait() == 2
    assert len(running.stderr.splitlines()) == 1, running.stderr
    assert f"loader process {victim} was killed by signal 9" in running.stderr
    status = Status.of(tmp_path / "run")
    assert status and status.state == "failed" and f"loader process {victim}" in status.reason


def test_a_loader_process_killed_during_an_evaluation_is_reported_in_one_line(tmp_path: Path, tiny: str) -> None:
    assert run_fork(tmp_path, "train", tiny, "--images", "32", "--out", "run").wait() == 0
    holds = Holds(tmp_path / "holds")
    holds.hold("prediction")
    workers = ("--set", "loader=workers", "--set", "workers=1", *holds.settings)
    running = start_fork(tmp_path, "evaluate", "run", "--trust", *workers)
    holds.wait_for("prediction", running)
    (victim,) = children_of(running.pid)
    os.kill(victim, signal.SIGKILL)
    assert running.wait() == 2
    assert len(running.stderr.splitlines()) == 1, running.stderr
    assert f"loader process {victim} was killed by signal 9" in running.stderr


def train_in_a_program(tiny: str) -> int:
    """Train without saves, since a slow disk would delay them."""
    import paceline

    try:
        paceline.train(
            tiny, loader="workers", workers=1, images=16_000_000, save_every="1000000 steps", timeout=3.0, out="run"
        )
    except paceline.UserError as error:
        print(f"caught: {error}")
    return 7


def test_a_run_whose_loader_process_hangs_raises_an_error_that_the_calling_program_can_catch(
    tmp_path: Path, tiny: str
) -> None:
    (running,) = start_function_in_ranks(tmp_path, 1, train_in_a_program, tiny)
    metrics = tmp_path / "run" / "metrics.jsonl"
    wait_until(lambda: metrics.exists() and metrics.stat().st_size, running)
    loaders = children_of(running.pid)
    for loader in loaders:
        os.kill(loader, signal.SIGSTOP)
    assert running.wait() == 7
    assert "caught: no progress for " in running.stdout and "(--timeout 3)" in running.stdout
    status = Status.of(tmp_path / "run")
    assert status and status.state == "failed" and "no progress" in status.reason
    wait_until(lambda: not any(is_child(loader, parent) for loader in loaders for parent in (1, running.pid)))
