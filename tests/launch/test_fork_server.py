"""The fork server runs `paceline` commands like new processes do, but without importing PyTorch for each of them."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from running import TIMEOUT_SECONDS, processes_naming, wait_until

from paceline import __version__
from paceline.core.errors import UserError
from paceline.launch import child
from paceline.launch.child import Child, ForkServers, failure_reason


@contextmanager
def started(folder: Path) -> Iterator[ForkServers]:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(child, "MODULES", ())  # so that the server starts quickly
        with ForkServers() as servers:
            yield servers


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkServers]:
    """Fork servers for tests that leave them as they are."""
    with started(tmp_path_factory.mktemp("shared")) as servers:
        yield servers


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[ForkServers]:
    with started(tmp_path) as servers:
        yield servers


def end_of(child: Child) -> int:
    code = wait_until(lambda: None if child.poll() is None else (child.poll(),), seconds=TIMEOUT_SECONDS)
    return int(code[0])


def test_a_forked_command_writes_a_log_and_returns_its_exit_code(
    tmp_path: Path, shared: ForkServers, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(FileNotFoundError):
        shared.start(["--version"], tmp_path / "nowhere" / "log.txt", {})
    good = Child(["--version"], tmp_path / "logs/good.txt", start=shared.start)
    bad = Child(["train", "no-such-recipe"], tmp_path / "logs/bad.txt", start=shared.start)
    wait_until(lambda: not Path(f"/proc/{good._process.pid}").exists())
    with monkeypatch.context() as patch:
        patch.setattr(good, "poll", lambda: None)  # the command ends between this check and the signal
        good.kill()
    assert (end_of(good), end_of(bad)) == (0, 2)
    assert __version__ in (tmp_path / "logs/good.txt").read_text()
    assert "no-such-recipe" in failure_reason(tmp_path / "logs/bad.txt")


@pytest.mark.slow
def test_forked_commands_have_the_environment_variables_at_their_start(
    tmp_path: Path, servers: ForkServers, monkeypatch: pytest.MonkeyPatch
) -> None:
    widths = []
    for columns in ("60", "110"):
        log = tmp_path / f"{columns}.txt"
        assert end_of(Child(["--help"], log, {"COLUMNS": columns}, servers.start)) == 0
        widths.append(max(map(len, log.read_text().splitlines())))
    assert widths[0] <= 60 < widths[1] <= 110
    monkeypatch.setenv("COLUMNS", "60")
    assert servers.start(["--help"], tmp_path / "help.txt", {}).wait() == 0
    assert max(map(len, (tmp_path / "help.txt").read_text().splitlines())) <= 60


def test_a_forked_command_can_be_interrupted_and_killed(tmp_path: Path, shared: ForkServers) -> None:
    boards = [Child(["board", ".", "--port", "0"], tmp_path / f"{n}.txt", start=shared.start) for n in range(2)]
    for n in range(2):
        wait_until(lambda n=n: "http" in (tmp_path / f"{n}.txt").read_text())
    boards[0].send(signal.SIGINT)
    assert end_of(boards[0]) in (0, 130)
    boards[1].kill()
    assert boards[1].poll() == -signal.SIGKILL


@pytest.mark.slow
def test_forked_commands_die_with_their_server(tmp_path: Path, servers: ForkServers) -> None:
    board = servers.start(["board", ".", "--port", "0"], tmp_path / "log.txt", {"MARK": str(tmp_path / "mark")})
    log = tmp_path / "log.txt"
    wait_until(lambda: log.is_file() and "http" in log.read_text())
    (server,) = servers._servers.values()
    server._process.kill()
    assert board.wait() == -signal.SIGKILL
    wait_until(lambda: not processes_naming(str(tmp_path / "mark")))
    with pytest.raises(UserError, match="ended unexpectedly"):
        server.start(["--version"], tmp_path / "log.txt")
