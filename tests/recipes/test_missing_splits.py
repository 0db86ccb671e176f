"""Data without a test split or labels: GANs need neither; other recipes report what they need."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import paceline
from paceline.cli.app import run
from paceline.contracts.recipe import Recipe
from paceline.core.errors import UserError
from paceline.core.registry import load_class


@pytest.fixture(autouse=True)
def training_images_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    pixels = np.random.default_rng(0).integers(0, 256, (64, 32, 32), dtype=np.uint8)
    np.savez("own.npz", x_train=pixels, y_train=np.arange(64) % 2)


def train(recipe: str, **settings: Any) -> paceline.TrainResult:
    small = load_class("recipe", recipe, Recipe).small | {"batch_size": 16, "data": "npz", "data_root": "own.npz"}
    return paceline.train(recipe, images=32, accelerator="cpu", **(small | {"out": "run"} | settings))


@pytest.mark.parametrize("recipe", ["dcgan", "dual_gan", "r3gan"])
def test_a_gan_needs_no_test_images_and_no_labels(recipe: str) -> None:
    np.savez("own.npz", x_train=np.random.default_rng(0).integers(0, 256, (64, 32, 32), dtype=np.uint8))
    result = train(recipe, few_images="allow")
    assert result.images == 32 and result.metrics["train/FID[pixels-8x8]"] > 0
    assert paceline.load("run", device="cpu").sample(2).shape[:2] == (2, 1)


def test_a_recipe_that_needs_labels_reports_the_missing_arrays() -> None:
    np.savez("own.npz", x_train=np.zeros((64, 32, 32), np.uint8))
    with pytest.raises(UserError, match=r"at least two classes: .*; own\.npz: has no y_train"):
        train("classification")
    with pytest.raises(UserError, match=r"conditional=on: the data has no classes; .*; own\.npz: has no y_train"):
        train("r3gan", conditional="on")


def test_a_gan_trains_on_all_images_of_a_folder_without_a_test_folder(capsys: pytest.CaptureFixture[str]) -> None:
    Path("images").mkdir()
    for number in range(20):
        Image.new("RGB", (16, 16), (number, 0, 0)).save(f"images/{number}.png")
    train("dcgan", data="folder", data_root="images", few_images="allow", size=32, evaluate_every="never")
    printed = capsys.readouterr().out
    assert "data folder: 20 train\n" in printed
    assert "images are flipped left to right at random; --set flip=off switches this off" in printed
    assert run(["evaluate", "run", "--accelerator", "cpu", "--set", "few_images=allow"]) == 0
    assert "20 real in split 'train'" in capsys.readouterr().out


def test_cached_statistics_are_not_used_after_an_image_has_changed(capsys: pytest.CaptureFixture[str]) -> None:
    Path("images").mkdir()
    for number in range(300):  # more than the fingerprint covers
        Image.new("RGB", (8, 8), (number % 256, 0, 0)).save(f"images/{number:03}.png")
    train("dcgan", data="folder", data_root="images", few_images="allow", size=32, evaluate_every="never", flip="off")
    assert "flipped" not in capsys.readouterr().out
    found = []
    for changed in (None, 1, 3, 5):  # not all of these are covered
        if changed:
            Image.new("RGB", (8, 8), (0, 0, 255)).save(f"images/{changed:03}.png")
        assert run(["evaluate", "run", "--accelerator", "cpu", "--set", "few_images=allow"]) == 0
        found.append(capsys.readouterr().out.partition("FID")[2].splitlines()[0])
    assert len(set(found)) == len(found)


def test_a_pack_for_a_gan_holds_out_no_images(capsys: pytest.CaptureFixture[str]) -> None:
    Path("images").mkdir()
    for number in range(20):
        Image.new("RGB", (32, 32), (number, 0, 0)).save(f"images/{number}.png")
    words = ["pack", "images", "--data", "folder", "--set", "size=32", "--workers", "0"]
    assert run([*words, "packed"]) == 0 and "packed 16 train, 4 test samples" in capsys.readouterr().out
    assert run([*words, "all", "--train-only"]) == 0 and "packed 20 train samples" in capsys.readouterr().out
    assert run([*words, "shards", "--train-only", "--to-shards"]) == 0
    for kind, folder in (("packed", "all"), ("shards", "shards")):
        train("dcgan", data=kind, data_root=folder, evaluate_every="never", out=f"{kind}-run")
        assert f"data {kind}: 20 train\n" in capsys.readouterr().out


def test_a_classifier_without_test_images_is_evaluated_on_validation_samples(
    capsys: pytest.CaptureFixture[str],
) -> None:
    metrics = train("classification", validation=0.25).metrics
    assert "validation/top1" in metrics and "test/top1" not in metrics
    assert run(["evaluate", "run", "--accelerator", "cpu"]) == 0
    assert "on the validation split of npz: 16 samples" in capsys.readouterr().out
    assert run(["evaluate", "run", "--accelerator", "cpu", "--split", "test"]) == 2
    assert "--split test: the data has no test split; choose from: train, validation" in capsys.readouterr().err
    assert run(["evaluate", "run", "--accelerator", "cpu", "--split", "tset"]) == 2
    assert "unknown split 'tset'" in capsys.readouterr().err


def test_data_with_another_number_of_classes_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    train("r3gan", evaluate_every="never")
    np.savez("own.npz", x_train=np.zeros((64, 32, 32), np.uint8), y_train=np.zeros(64, int))
    assert run(["evaluate", "run", "--accelerator", "cpu", "--set", "few_images=allow"]) == 2
    assert "classes of the images: 1, but run expects 2" in capsys.readouterr().err


@pytest.mark.parametrize("recipe", ["dcgan", "r3gan"])
def test_metrics_by_class_of_an_unconditional_generator_are_rejected_before_the_run_starts(recipe: str) -> None:
    settings = {"conditional": "off"} if recipe == "r3gan" else {}
    with pytest.raises(UserError, match="per_class=on: the generator is not conditional on classes"):
        train(recipe, per_class=True, few_images="allow", **settings)
    assert not Path("run").exists()


def test_a_classifier_for_features_that_does_not_exist_is_reported() -> None:
    with pytest.raises(UserError, match="runs/nope: no such file or folder"):
        train("dcgan", features="runs/nope", few_images="allow")


def test_a_classifier_without_any_samples_to_evaluate_is_rejected_unless_evaluation_is_switched_off() -> None:
    with pytest.raises(UserError, match=r"--data npz: has no test split, and validation=0 .* --set validation=0\.1"):
        train("classification", validation=0)
    assert train("classification", validation=0, evaluate_every="never").images == 32
