"""A run on a busy machine is marked, because its speed is too low."""

from __future__ import annotations

import os
import tomllib
from pathlib import Path

import pytest
from running import run_fork

from paceline.core.host import LOAD, excess_load, record_load


def test_the_load_when_the_command_started_is_reported_if_the_machine_was_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    monkeypatch.delenv(LOAD)
    monkeypatch.setattr(os, "getloadavg", lambda: (5.25, 0.0, 0.0))
    record_load()
    monkeypatch.setattr(os, "getloadavg", lambda: (0.0, 0.0, 0.0))
    record_load()
    assert excess_load() == "5.2 on 4 cores"
    monkeypatch.setenv(LOAD, "5.0")
    assert excess_load() == ""


def test_a_run_on_a_busy_machine_is_marked_in_its_output_and_its_record(tmp_path: Path, tiny: str) -> None:
    outputs = {}
    for seed, (name, load) in enumerate((("idle", "0.0"), ("busy", "999.0"))):
        words = ("train", tiny, "--images", "96", "--seed", str(seed), "--out", name)
        trained = run_fork(tmp_path, *words, environment={LOAD: load})
        assert trained.wait() == 0, trained.stderr
        outputs[name] = trained.stdout
    where = f"999.0 on {os.cpu_count()} core"
    assert f"the machine was busy (load average {where}" in outputs["busy"] and "busy" not in outputs["idle"]
    records = {name: tomllib.loads((tmp_path / name / "config.toml").read_text())["provenance"] for name in outputs}
    assert records["busy"]["load_average_at_start"].startswith(where) and "load_average_at_start" not in records["idle"]
