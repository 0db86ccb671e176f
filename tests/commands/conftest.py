"""Fixtures for the tests of commands."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from running import QuickForks

from paceline.cli.app import run

Rejected = Callable[..., str]


@pytest.fixture(autouse=True)
def quick_forks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let comparisons in this process train in forks of it, instead of in a process that first imports PyTorch."""
    monkeypatch.setattr("paceline.commands.compare.ForkServers", QuickForks)


@pytest.fixture
def rejected(capsys: pytest.CaptureFixture[str]) -> Rejected:
    """Return a function that runs a command, which must end with one line about a user error, and returns that line."""

    def line_of(*words: object) -> str:
        capsys.readouterr()
        assert run(list(map(str, words))) == 2
        lines = [line for line in capsys.readouterr().err.splitlines() if not line.endswith(" …")]
        assert len(lines) == 1 and lines[0].startswith("paceline: "), lines
        return lines[0].removeprefix("paceline: ")

    return line_of
