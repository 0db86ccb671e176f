"""By default, short runs are evaluated a few times, and the weights do not depend on the interval."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from PIL import Image
from running import run_fork, weights_of

from paceline.training.loop import automatic_interval

SIZE_PX = 256  # of the photographs, of which a run sees crops of 32 pixels


@pytest.mark.parametrize(
    ("epoch", "step", "num_epochs", "evaluated", "expected"),
    [
        (45_000, 128, 50, 5_000, 1),  # as usual, an epoch
        (1_294, 64, 12, 144, 1),
        (100, 10, 300, 10, 6),  # at most 50 evaluations
        (8, 16, 1_000, 2, 20),  # an epoch is shorter than a step
        (8, 16, 40, 2, 14),  # three times in a run of 20 steps
        (1_438, 128, 20, 10_000, 28),  # only at the end: four images to train on per image to evaluate
        (400, 1, 10, 250, 3),
    ],
)
def test_the_interval_depends_on_numbers_of_images(
    epoch: int, step: int, num_epochs: int, evaluated: int, expected: int
) -> None:
    interval = automatic_interval(epoch=epoch, step=step, total=epoch * num_epochs, evaluated=evaluated)
    assert interval == expected * epoch


@pytest.mark.slow
def test_a_short_run_on_a_few_large_photographs_evaluates_a_few_times(tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    for number in range(10):
        Image.effect_noise((SIZE_PX, SIZE_PX), 10 * number + 9).save(tmp_path / f"photos/{number}.png")
    words = ["train", "restoration", "--preset", "quick", "--data-root", "photos", "--accelerator", "cpu"]
    words += ["--images", "640", "--batch-size", "16", "--set", "crop=32", "--set", "width=4", "--set", "depth=1"]
    often = ["--set", "evaluate_every=8 steps", "--set", "sample_every=never", "--set", "save_every=100%"]
    auto = [word for name in ("evaluate", "sample", "save") for word in ("--set", f"{name}_every=auto")]
    weights: dict[str, bytes] = {}
    for name, intervals in (("auto", auto), ("often", often)):
        trained = run_fork(tmp_path, *words, *intervals, "--out", name)
        assert trained.wait() == 0, trained.stderr
        lines = [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        evaluated = [line["images"] for line in lines if "time/evaluation_seconds" in line]
        assert len(evaluated) == (3 if name == "auto" else 5) and evaluated[-1] == 640
        assert ("evaluation: every 37 epochs" in trained.stdout) == (name == "auto"), trained.stdout
        weights[name] = weights_of(tmp_path / name)["weights.safetensors"]
    assert weights["auto"] == weights["often"]
