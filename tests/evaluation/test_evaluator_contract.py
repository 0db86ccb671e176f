"""Tests that every evaluator (the component that computes metrics) must pass."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from no_run import no_run

from paceline.config.settings import RunSettings
from paceline.contracts.recipe import DataSpec, Evaluation, Recipe
from paceline.core.registry import load_class, names
from paceline.data.source import ArraySource
from paceline.evaluation.contract import Case, Evaluator, is_classifier

SPEC = DataSpec(channels=3, height=16, width=16, num_classes=4, panels=("stain", "segmentation"))
COUNT = 200  # number of images; must exceed the 192 features of an 8×8 RGB image


@pytest.mark.parametrize("name", names("evaluator"))
def test_an_evaluator_is_ready_for_use_after_construction(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    source = ArraySource({"image": np.zeros((COUNT, 16, 16, 3), np.uint8)}, SPEC)
    case = Case(source, "test", COUNT, no_run)
    evaluator = load_class("evaluator", name, Evaluator)(case, SPEC, torch.device("cpu"), RunSettings())
    assert all(isinstance(value, str | int | float) for value in evaluator.protocol().values())
    assert all(isinstance(note, str) for note in evaluator.notes) and isinstance(evaluator.label, str)
    assert not evaluator.needs_samples or evaluator.sample_sums().ndim == 1
    sums = evaluator.sums()
    assert sums.dtype == torch.float64 and sums.ndim == 1 and not sums.any(), "nothing has been measured yet"


def test_a_recipe_with_a_classification_evaluator_is_a_classifier(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "from paceline.evaluation.contract import Evaluator\n\n\nclass Own(Evaluator):\n    classifies = True\n"
    )

    def recipe(name: str) -> type[Recipe]:
        return type("Named", (Recipe,), {"evaluation": Evaluation(name)})

    assert is_classifier(recipe("accuracy")) and is_classifier(recipe(str(tmp_path / "own.py")))
    assert not is_classifier(recipe("generation")) and not is_classifier(recipe(""))
