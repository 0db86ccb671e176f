"""The repr of a public object is one short line, for use in notebooks and debuggers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import paceline
from paceline.inference.trained import read_stored
from paceline.runs.checkpoint import choose_checkpoint
from paceline.runs.folder import RunFolder
from paceline.runs.weights import write_weights

SAME = paceline.Difference("ddp", "weights", "generator", 2.2e-16, 1e-9, "")
OTHER = paceline.Difference("fsdp", "gradients of penalty", "discriminator", 0.25, 1e-12, "main.0.weight")


def test_the_repr_of_a_training_result_shows_the_metrics_from_the_last_evaluation() -> None:
    tested = {"classifier/cross_entropy": 0.1, "validation/top1": 97.2, "test/top1": 98.3333, "test/count": 359.0}
    tested["test/checkpoint_images"] = 14_370.0
    generated = {"train/FID[pixels-8x8]": 8.5348, "time/images_per_second": 72.7}
    for result, shown in (
        (("first", 14_370, 0, tested), "'runs/first', images=14370, test/top1=98.33"),
        (("gan", 32, 130, generated), "'runs/gan', images=32, exit_code=130, train/FID[pixels-8x8]=8.535"),
        (("lost", 0, 1, {}), "'runs/lost', images=0, exit_code=1"),
    ):
        assert repr(paceline.TrainResult(Path("runs") / result[0], *result[1:])) == f"TrainResult(folder={shown})"


def test_a_training_result_is_ok_if_the_run_finished() -> None:
    assert paceline.TrainResult(Path("run"), 32, 0, {}).ok
    assert not paceline.TrainResult(Path("run"), 32, 75, {}).ok


def test_the_repr_of_a_difference_shows_whether_it_is_within_the_tolerance() -> None:
    assert repr(SAME) == "Difference(ddp, weights of generator, 2.2e-16, ok)"
    assert repr(OTHER) == (
        "Difference(fsdp, gradients of penalty in discriminator, 2.5e-01, above 1e-12 in main.0.weight)"
    )


def test_a_verify_result_is_true_if_every_difference_is_within_its_tolerance() -> None:
    good, bad = paceline.VerifyResult((SAME, SAME)), paceline.VerifyResult((SAME, OTHER))
    assert good and good.ok and not bad and not bad.ok
    assert repr(good) == "VerifyResult(ok, 2 differences, largest 2.2e-16)"
    assert repr(bad) == f"VerifyResult(1 of 2 differences above tolerance, first {OTHER})"


def test_the_repr_of_a_data_spec_omits_default_values() -> None:
    names = tuple(f"class {number}" for number in range(1000))
    spec = paceline.DataSpec(3, 224, 224, num_classes=1000, class_names=names)
    assert repr(spec) == (
        "DataSpec(channels=3, height=224, width=224, num_classes=1000, "
        "class_names=('class 0', 'class 1', 'class 2', ...))"
    )


def test_the_repr_of_settings_omits_default_values() -> None:
    assert repr(paceline.RunSettings()) == "RunSettings()"
    folder = "/data/" + "deep/" * 12
    assert repr(paceline.RunSettings(data_root=folder, seed=1)) == f"RunSettings(data_root={folder!r}, seed=1)"


def test_the_repr_of_a_loss_shows_values_and_shapes() -> None:
    weight = torch.ones(3, requires_grad=True)
    loss = paceline.Loss({"real": weight.sum() / 3}, signals={"balance": torch.tensor(0.123456)})
    assert repr(loss) == "Loss(terms={'real': 1}, signals={'balance': 0.1235})"
    assert repr(paceline.Loss({}, shared={"fake": torch.zeros(2, 1, 8, 8)})) == (
        "Loss(terms={}, shared={'fake': [2, 1, 8, 8]})"
    )


def test_the_repr_of_a_source_shows_how_many_samples_it_has() -> None:
    arrays = {"image": np.zeros((1200, 8, 9, 3), np.uint8)}
    source = paceline.ArraySource(arrays, paceline.DataSpec(3, 8, 9, num_classes=10))
    assert repr(source) == "ArraySource(1,200 samples, 3×8×9, 10 classes)"
    assert repr(paceline.ArraySource(arrays, paceline.DataSpec(3, 8, 9))) == "ArraySource(1,200 samples, 3×8×9)"


def test_the_repr_of_a_model_shows_its_recipe_and_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny: str
) -> None:
    monkeypatch.chdir(tmp_path)
    paceline.train(tiny, images=160, loggers="", accelerator="cpu", out="run")
    best = choose_checkpoint(RunFolder(Path("run")).checkpoints, "best").images
    assert repr(paceline.load("run", device="cpu")) == f"Model({tiny}, 'run', best checkpoint at {best} images, cpu)"
    assert repr(paceline.load(Path("run"), 160, "cpu")) == f"Model({tiny}, 'run', checkpoint at 160 images, cpu)"

    stored = read_stored("run")
    write_weights(Path("tiny.safetensors"), stored.config, stored.spec, stored.weights)
    assert repr(paceline.load("tiny.safetensors", device="cpu")) == f"Model({tiny}, 'tiny.safetensors', cpu)"
