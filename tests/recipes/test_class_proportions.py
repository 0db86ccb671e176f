"""A class-conditional GAN is evaluated with the class proportions of its data, whatever the number of processes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from running import run_fork, start_ranks
from torch import Tensor

from paceline.commands.configure import configure
from paceline.training.build import assemble
from paceline.training.evaluate import training_evaluator

pytestmark = pytest.mark.usefixtures("own_cache")
COUNTS = (90, 29, 1)
SETTINGS: dict[str, Any] = {"nz": 4, "width": 8, "num_blocks": 1, "group_size": 4, "size": 16, "few_images": "allow"}
SETTINGS |= {"generated_images": 600, "per_class": True, "evaluate_every": "1000 steps"}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An .npz file whose three classes have different numbers of images."""
    path = tmp_path_factory.mktemp("data") / "unequal.npz"
    labels = np.repeat(np.arange(3), COUNTS)
    images = np.random.default_rng(0).integers(0, 256, (len(labels), 16, 16, 1), dtype=np.uint8)
    np.savez(path, x_train=images, y_train=labels, x_test=images[:8], y_test=labels[:8])
    return path


def test_generated_images_have_the_class_proportions_of_the_real_images(data: Path) -> None:
    flags = {"data": "npz", "data_root": str(data), "accelerator": "cpu", "batch_size": "8", **SETTINGS}
    parts = assemble(configure("r3gan", flags))
    evaluator = training_evaluator(parts)
    assert evaluator
    predict, labels = parts.recipe.predict, list[Tensor]()

    def recording(batch: dict[str, Tensor]) -> dict[str, Tensor]:
        prediction = predict(batch)
        labels.append(prediction["label"])
        return prediction

    parts.recipe.predict = recording  # type: ignore[method-assign]
    metrics = evaluator.measure()
    shares = torch.cat(labels).bincount(minlength=3) / 600
    assert shares.tolist() == pytest.approx([count / sum(COUNTS) for count in COUNTS], abs=0.05)
    assert evaluator.protocol["classes"] == "in the proportions of the real images"
    assert all(np.isfinite(value) for value in metrics.values())


def test_a_class_with_one_image_has_no_fid_and_one_line_says_so(tmp_path: Path, data: Path) -> None:
    words = [word for name, value in SETTINGS.items() for word in ("--set", f"{name}={value}")]
    command = ("train", "r3gan", "--data", "npz", "--data-root", str(data), "--accelerator", "cpu", *words)
    trained = run_fork(tmp_path, *command, "--batch-size", "8", "--images", "16", "--out", "run")
    assert trained.wait() == 0, trained.stderr
    note = "FID by class: not measured for 1 of 3 classes (2), with fewer than 2 real or generated images each"
    assert trained.stdout.splitlines().count(note) == 1
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    evaluated = next(line for line in lines if "train/FID_by_class[pixels-8x8]" in line)
    by_class = {name: value for name, value in evaluated.items() if name.startswith("train/FID:")}
    assert by_class.keys() == {"train/FID:0[pixels-8x8]", "train/FID:1[pixels-8x8]"}
    assert evaluated["train/FID_by_class[pixels-8x8]"] == pytest.approx(sum(by_class.values()) / 2)
    assert None not in evaluated.values()
    whole = run_fork(tmp_path, "evaluate", "run", "--accelerator", "cpu")
    assert whole.wait() == 0, whole.stderr
    assert note in whole.stdout.splitlines()
    ranks = start_ranks(tmp_path, 2, "evaluate", "run", "--accelerator", "cpu", "--devices", "2")
    assert [rank.wait() for rank in ranks] == [0, 0], ranks[0].stderr
    values, shared = (_printed(one.stdout) for one in (whole, ranks[0]))
    assert values == pytest.approx(shared, rel=1e-3) and "FID[pixels-8x8]" in values


def test_a_conditional_generator_is_not_evaluated_on_classes_with_other_names(tmp_path: Path) -> None:
    images = np.random.default_rng(0).integers(0, 256, (4, 16, 16), dtype=np.uint8)
    for folder in ("own/cat", "own/dog", "other/cat", "other/eel"):
        (tmp_path / folder).mkdir(parents=True)
        for number, pixels in enumerate(images):
            Image.fromarray(pixels).save(tmp_path / folder / f"{number}.png")
    flags = ["--data", "folder", "--data-root", "own", "--accelerator", "cpu", "--images", "8", "--batch-size", "4"]
    settings = SETTINGS | {"generated_images": 8, "per_class": False, "evaluate_every": "never"}
    words = [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]
    for conditional, code in (("auto", 2), ("off", 0)):
        named = ["--set", f"conditional={conditional}", "--out", conditional]
        trained = run_fork(tmp_path, "train", "r3gan", *flags, *words, *named)
        assert trained.wait() == 0, trained.stderr
        evaluated = run_fork(tmp_path, "evaluate", conditional, "--data-root", "other", "--accelerator", "cpu")
        assert evaluated.wait() == code, evaluated.stderr
        assert ("is 'eel', but auto was trained with 'dog'" in evaluated.stderr) == (code == 2)


def _printed(text: str) -> dict[str, float]:
    fields = (line.split() for line in text.splitlines() if line.startswith("  "))
    return {words[0]: float(words[1]) for words in fields}
