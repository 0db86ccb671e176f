"""Evaluation and sample images on one GPU: captured predictions equal eager ones, and nothing waits for the device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.commands.configure import configure
from paceline.contracts.recipe import Batch
from paceline.parallel.graphed_function import EAGER_CALLS, GraphedFunction
from paceline.training.build import Parts, assemble
from paceline.training.evaluate import EvaluatedWeights, SplitEvaluator, training_evaluator

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

CASES: list[tuple[str, dict[str, Any]]] = [
    ("classification", {"ema_half_life": "200 images"}),
    ("dcgan", {"ema_half_life": "500 images", "generated_images": 2500}),
    ("super_resolution", {"stage": "pretrain"}),
    ("restoration", {}),
    ("translation", {}),
]


def build(recipe: str, **settings: Any) -> tuple[Parts, SplitEvaluator]:
    small = {"deterministic": True, "precision": "bf16", "images": 10**6} | settings
    parts = assemble(configure(recipe, small, small=True))
    evaluator = training_evaluator(parts)
    assert evaluator
    return parts, evaluator


def train_and_evaluate(recipe: str, rounds: int = 6, **settings: Any) -> tuple[list[dict[str, float]], SplitEvaluator]:
    """Train a few steps before each of several evaluations; return the metrics of each."""
    parts, evaluator = build(recipe, **settings)
    steps, found = parts.feed.steps(0, 10**6), []
    evaluated = EvaluatedWeights(parts.step, parts.feed)
    parts.recipe.train()
    for number in range(rounds):
        for _ in range(2):
            parts.run_step(next(steps))
        with evaluated.at(number):
            found.append(evaluator.measure())
    return found, evaluator


@pytest.mark.parametrize(("recipe", "settings"), CASES, ids=str)
def test_captured_predictions_give_the_same_metrics_as_eager_ones(recipe: str, settings: dict[str, Any]) -> None:
    eager, _ = train_and_evaluate(recipe, graph="off", **settings)
    captured, evaluator = train_and_evaluate(recipe, graph="auto", **settings)
    graphed = evaluator._predict._graphed
    assert graphed and not graphed.note, graphed and graphed.note
    assert graphed._graphs, "nothing was captured"
    assert captured == eager


def test_a_prediction_that_waits_for_the_gpu_is_reported_once_and_evaluated_eagerly(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = tmp_path / "waiting.py"
    recipe.write_text(
        "from paceline.recipes.classification import Classification\n\n\n"
        "class Waiting(Classification):\n"
        "    def predict(self, batch):\n"
        "        made = super().predict(batch)\n"
        "        made['logits'].sum().item()\n"
        "        return made\n"
    )
    eager, _ = train_and_evaluate(str(recipe), graph="off")
    found, _ = train_and_evaluate(str(recipe), graph="auto")
    assert found == eager
    assert capsys.readouterr().out.count("evaluation: eager. CUDA graphs: off") == 1


@pytest.mark.parametrize("fails", [True, False], ids=["failed", "successful"])
def test_a_captured_prediction_does_not_change_the_random_numbers_of_a_captured_step(fails: bool) -> None:
    device = torch.device("cuda", torch.cuda.current_device())

    def predict(inputs: Batch) -> Batch:
        if fails:
            inputs["image"].sum().item()
        return {"image": inputs["image"] * 2}

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        drawn = torch.rand(8, device=device)
    graphed = GraphedFunction(predict, device)
    for _ in range(EAGER_CALLS + 2):
        graphed({"image": torch.ones(2, 4, device=device)})
    assert bool(graphed.note) == fails
    torch.cuda.manual_seed(5)
    expected = torch.rand(8, device=device)
    torch.cuda.manual_seed(5)
    graph.replay()
    assert torch.equal(drawn, expected)
