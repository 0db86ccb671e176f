"""Which phases run concurrently, and training with --compile on a machine without a compiler."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch._inductor.config
from ranks import difference, make_parts, run_steps, weights

from paceline.contracts.recipe import Phase
from paceline.training.step import groups

DUAL = [Phase("generator", "g"), Phase("first", "d1"), Phase("second", "d2", concurrent=True)]


def names(together: list[list[Phase]]) -> list[list[str]]:
    return [[phase.name for phase in phases] for phases in together]


def test_an_independent_phase_runs_concurrently_with_the_previous_one() -> None:
    assert names(groups(DUAL)) == [["generator"], ["first", "second"]]


def test_phases_for_one_network_never_run_concurrently() -> None:
    penalty = Phase("penalty", "d2", concurrent=True)
    assert names(groups([*DUAL, penalty])) == [["generator"], ["first", "second"], ["penalty"]]


def test_a_concurrent_phase_runs_alone_if_the_phases_before_it_are_not_due() -> None:
    assert names(groups(DUAL[2:])) == [["second"]]


def test_without_a_compiler_training_adds_a_note_and_runs_eagerly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch._inductor.config.cpp, "cxx", (str(tmp_path / "no-compiler"),))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    tiny = str(Path(__file__).parents[1] / "tiny.py")
    plain, compiled = make_parts(tiny), make_parts(tiny, compile=True)
    assert any(note.startswith("compile: off, since ") for note in compiled.notes), compiled.notes
    run_steps(plain, 2)
    run_steps(compiled, 2)
    assert difference(weights(plain), weights(compiled)) == 0
