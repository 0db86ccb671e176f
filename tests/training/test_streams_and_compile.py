"""Phases that may run together, and networks through a compiler that may not be there."""

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


def test_a_phase_that_needs_nothing_of_the_one_before_goes_beside_it() -> None:
    assert names(groups(DUAL)) == [["generator"], ["first", "second"]]


def test_phases_of_one_network_never_go_beside_each_other() -> None:
    penalty = Phase("penalty", "d2", concurrent=True)
    assert names(groups([*DUAL, penalty])) == [["generator"], ["first", "second"], ["penalty"]]


def test_the_first_phase_that_is_due_goes_alone_whatever_it_says() -> None:
    assert names(groups(DUAL[2:])) == [["second"]]


def test_without_a_compiler_training_goes_on_eagerly_says_so_and_nothing_has_changed(
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
