"""Each run records software versions, hardware and the git commit."""

from __future__ import annotations

import subprocess
from datetime import UTC, datetime, timedelta
from importlib.metadata import version
from pathlib import Path

import pytest
import torch

from paceline.runs.provenance import versions_and_hardware


def test_versions_hardware_and_time_are_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    spec = versions_and_hardware()
    assert spec["torch"] == version("torch") and spec["lightning"] == version("lightning")
    assert spec["threads"] == str(torch.get_num_threads())
    assert int(spec["cores"]) >= 1 and spec["memory"].endswith("GiB") and spec["cpu"] and spec["python"]
    assert abs(datetime.fromisoformat(spec["started"]) - datetime.now(UTC)) < timedelta(minutes=1)
    assert all(type(value) is str and value for value in spec.values())


def test_the_git_commit_and_uncommitted_changes_are_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert "git_commit" not in versions_and_hardware()
    (tmp_path / "file").write_text("one")
    author = ["-c", "user.name=a", "-c", "user.email=a@example.com"]
    for command in (["init", "-q"], ["add", "file"], [*author, "commit", "-q", "-m", "one"]):
        subprocess.run(["git", *command], check=True)
    commit = subprocess.run(["git", "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
    assert versions_and_hardware()["git_commit"] == commit
    (tmp_path / "file").write_text("two")
    assert versions_and_hardware()["git_commit"] == f"{commit} with changes"
    assert capfd.readouterr() == ("", "")
