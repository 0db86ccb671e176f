"""Images without labels: unconditional GANs train on them, and recipes that need labels report the missing arrays."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import paceline
from paceline.contracts.recipe import Recipe
from paceline.core.errors import UserError
from paceline.core.registry import load_class


@pytest.fixture(autouse=True)
def unlabelled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    pixels = np.random.default_rng(0).integers(0, 256, (80, 32, 32), dtype=np.uint8)
    np.savez("own.npz", x_train=pixels[:64], x_test=pixels[64:])


def train(recipe: str, **settings: str) -> paceline.TrainResult:
    small = load_class("recipe", recipe, Recipe).small | {"batch_size": 16, "few_images": "allow"} | settings
    return paceline.train(recipe, data="npz", data_root="own.npz", images=32, accelerator="cpu", out="run", **small)


@pytest.mark.parametrize("recipe", ["dcgan", "dual_gan", "r3gan"])
def test_an_unconditional_gan_trains_on_an_npz_file_without_labels(recipe: str) -> None:
    assert train(recipe).images == 32
    assert paceline.load("run", device="cpu").sample(2).shape[:2] == (2, 1)


def test_a_recipe_that_needs_labels_reports_the_missing_arrays() -> None:
    missing = "own.npz: has no y_train or y_test"
    with pytest.raises(UserError, match=f"at least two classes: .*; {missing}"):
        paceline.train("classification", data="npz", data_root="own.npz", images=32, accelerator="cpu", out="run")
    with pytest.raises(UserError, match=f"conditional=on: the data has no classes; .*; {missing}"):
        train("r3gan", conditional="on")
