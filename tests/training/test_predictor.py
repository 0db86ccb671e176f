"""Predictions during training: their CUDA graphs are discarded if the weights move. Real graphs are tested on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from fake_captures import replace_captures
from ranks import make_parts, run_steps

from paceline.contracts.recipe import Batch
from paceline.parallel.graphed_function import EAGER_CALLS, LARGEST_PX
from paceline.training.evaluate import EvaluatedWeights, Predictor

GPU = torch.device("cuda")  # only its type is used


class Replayed:
    """Stands in for a captured graph: computes the function again on replay, and counts the captures."""

    captures = 0

    def __init__(self, function: Callable[[list[Batch]], Batch], batches: list[Batch], pool: object) -> None:
        self.function = function
        Replayed.captures += 1

    def replay(self, batches: list[Batch]) -> Batch:
        return self.function(batches)


@pytest.fixture(scope="module")
def gan() -> str:
    """The path to a GAN whose generator has an EMA."""
    return str(Path(__file__).parents[1] / "tiny_gan.py")


@pytest.fixture(autouse=True)
def without_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    replace_captures(monkeypatch, Replayed)
    monkeypatch.setattr(Replayed, "captures", 0)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (90, 100))


def predict_often(predictor: Predictor, batch: Batch) -> Batch:
    with predictor.evaluating():
        return [predictor(batch) for _ in range(EAGER_CALLS + 1)][-1]


def test_an_ema_is_evaluated_at_the_same_addresses_every_time_so_its_graph_stays_valid(gan: str) -> None:
    parts = make_parts(gan)
    predictor = Predictor(parts.recipe, parts.precision, GPU, captures=True)
    batch = parts.feed.drawer.rows("evaluation", 0, 4)
    evaluated, made = EvaluatedWeights(parts.step, parts.feed), []
    for number in range(3):
        run_steps(parts, 1)
        with evaluated.at(number):
            made.append(predict_often(predictor, batch))
            expected = parts.recipe.eval().predict(batch)
            parts.recipe.train()
        assert all(torch.equal(made[-1][name], expected[name]) for name in expected)
    assert Replayed.captures == 1
    predict_often(predictor, batch)  # the latest weights are at other addresses than their EMA
    assert Replayed.captures == 2


def test_a_recipe_is_in_evaluation_mode_only_while_it_predicts(gan: str) -> None:
    parts = make_parts(gan)
    predictor = Predictor(parts.recipe, parts.precision, torch.device("cpu"), captures=True)
    with predictor.evaluating():
        assert not parts.recipe.training
        predictor(parts.feed.drawer.rows("evaluation", 0, 4))
    assert parts.recipe.training and Replayed.captures == 0, "nothing is captured on a CPU"


def test_predictions_that_are_large_images_are_not_captured(gan: str, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = make_parts(gan)
    large = torch.zeros(1).expand(1, 1, 1, LARGEST_PX + 1)
    monkeypatch.setattr(parts.recipe, "predict", lambda batch: {"image": large})
    predict_often(Predictor(parts.recipe, parts.precision, GPU, captures=True), {"noise": torch.zeros(1, 2)})
    assert Replayed.captures == 0
