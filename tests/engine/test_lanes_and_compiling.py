"""Phases that may run together, and networks through a compiler that may not be there."""

from __future__ import annotations

from pathlib import Path

import pytest
from commands import run_fork

from paceline.engine.lanes import groups
from paceline.recipe import Phase

DUAL = [Phase("generator", "g"), Phase("first", "d1"), Phase("second", "d2", beside=True)]


def names(together: list[list[Phase]]) -> list[list[str]]:
    return [[phase.name for phase in phases] for phases in together]


def test_a_phase_that_needs_nothing_of_the_one_before_goes_beside_it() -> None:
    assert names(groups(DUAL)) == [["generator"], ["first", "second"]]


def test_phases_of_one_network_never_go_beside_each_other() -> None:
    penalty = Phase("penalty", "d2", beside=True)
    assert names(groups([*DUAL, penalty])) == [["generator"], ["first", "second"], ["penalty"]]


def test_the_first_phase_that_is_due_goes_alone_whatever_it_says() -> None:
    assert names(groups(DUAL[2:])) == [["second"]]


def test_without_a_compiler_training_goes_on_eagerly_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", str(tmp_path / "no-compiler"))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    words = [
        "train",
        "classification",
        "--set",
        "width=2",
        "--images",
        "256",
        "--epochs",
        "1",
        "--accelerator",
        "cpu",
        "--out",
        "run",
    ]
    ended = run_fork(tmp_path, *words, "--compile")
    assert ended.wait() == 0, ended.stderr
    assert "compile: off, since " in ended.stdout and "run: run" in ended.stdout
