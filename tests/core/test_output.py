"""Commands whose stdout or stderr is closed, is on a full disk, or has lost its reader."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from running import Running, start_command

TINY = str(Path(__file__).parents[1] / "tiny.py")
LOST = "stdout: cannot be written: "


def start_with(redirection: str, folder: Path, *arguments: str) -> Running:
    return start_command(folder, *arguments, before=("sh", "-c", f'"$@" {redirection}', "sh"))


def test_a_command_that_cannot_print_its_result_ends_with_one_line(tmp_path: Path) -> None:
    cases = {">&-": "--version", ">/dev/full": "train --help", "1</dev/null": "--version"}
    commands = [start_with(how, tmp_path, *words.split()) for how, words in cases.items()]
    commands.append(start_with("<&- >&-", tmp_path, "settings", "classification"))
    for command in commands:
        assert command.wait() == 2, command.stderr
        assert command.stderr.startswith(f"paceline: {LOST}") and len(command.stderr.splitlines()) == 1


def test_a_command_whose_reader_has_ended_ends_silently(tmp_path: Path) -> None:
    command = start_with("| true", tmp_path, "train", "--help")
    assert command.wait() == 0 and not command.stderr


@pytest.mark.parametrize("redirection", ["2>&-", "2>/dev/full"])
def test_without_stderr_commands_work_and_errors_are_printed_to_stdout(redirection: str, tmp_path: Path) -> None:
    command, rejected = (start_with(redirection, tmp_path, *words.split()) for words in ("--version", "train nope"))
    assert command.wait() == 0 and command.stdout.startswith("paceline ")
    assert rejected.wait() == 2 and rejected.stdout.startswith("paceline: unknown recipe 'nope'")


@pytest.mark.parametrize(
    ("redirection", "devices"),
    [("<&- >&- 2>&-", "1"), pytest.param("2>/dev/full | head -1", "2", marks=pytest.mark.slow)],
)
def test_a_run_continues_without_its_output(
    redirection: str, devices: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "temporary").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    words = ("train", TINY, "--accelerator", "cpu", "--devices", devices, "--out", "run")
    command = start_with(redirection, tmp_path, *words)
    assert command.wait() == 0, command.stderr
    assert not command.stderr
    assert json.loads((tmp_path / "run" / "status.json").read_text())["state"] == "finished"
    assert "test metrics" in (tmp_path / "run" / "logs" / "rank-0.txt").read_text()
    assert not os.listdir(tmp_path / "temporary")
