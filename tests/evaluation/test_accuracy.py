import numpy as np
import pytest
import torch
from no_run import no_run
from torchmetrics.classification import MulticlassAccuracy

from paceline.config.settings import RunSettings
from paceline.contracts.recipe import DataSpec
from paceline.data.source import ArraySource
from paceline.evaluation.contract import Case
from paceline.evaluation.evaluators.accuracy import Accuracy

CPU = torch.device("cpu")


def evaluator_of(num_classes: int) -> Accuracy:
    spec = DataSpec(channels=3, height=8, width=8, num_classes=num_classes)
    source = ArraySource({"image": np.zeros((1, 8, 8, 3), np.uint8)}, spec)
    return Accuracy(Case(source, "test", len(source), no_run), spec, CPU, RunSettings())


def sums_of(logits: torch.Tensor, labels: torch.Tensor, sizes: list[int]) -> torch.Tensor:
    """Return the sums that the accuracy evaluator computes from batches of the given sizes."""
    evaluator = evaluator_of(logits.shape[1])
    for part, label in zip(logits.split(sizes), labels.split(sizes), strict=True):
        evaluator.update({"logits": part}, {"label": label})
    return evaluator.sums()


@pytest.mark.parametrize("num_classes", [3, 5, 100])
def test_accuracy_computed_in_uneven_batches_equals_torchmetrics(num_classes):
    torch.manual_seed(0)
    labels = torch.randint(num_classes, (257,))
    logits = torch.randn(257, num_classes) + 2 * torch.nn.functional.one_hot(labels, num_classes)
    ranks = [sums_of(logits[:101], labels[:101], [64, 37]), sums_of(logits[101:], labels[101:], [100, 55, 1])]
    results = evaluator_of(num_classes).results(sum(ranks))
    for name, k in (("top1", 1), ("top5", min(5, num_classes))):
        theirs = MulticlassAccuracy(num_classes, top_k=k, average="micro")
        assert results[name] == pytest.approx(100 * theirs(logits, labels).item(), abs=1e-4)
    loss = torch.nn.functional.cross_entropy(logits.double(), labels)
    assert results["loss"] == pytest.approx(loss.item(), rel=1e-12)
    assert results["count"] == 257


def test_the_lower_class_ranks_first_if_logits_are_equal_and_nan_is_never_correct():
    results = evaluator_of(10).results(sums_of(torch.zeros(10, 10, dtype=torch.bfloat16), torch.arange(10), [10]))
    assert (results["top1"], results["top5"]) == (10, 50)
    logits, labels = torch.full((4, 3), torch.nan), torch.tensor([0, 1, 2, 0])
    results = evaluator_of(3).results(sums_of(logits, labels, [4]))
    assert (results["top1"], results["top5"]) == (0, 0)


def test_the_returned_sums_are_float64_copies():
    evaluator = evaluator_of(3)
    evaluator.update({"logits": torch.eye(3)}, {"label": torch.arange(3)})
    evaluator.sums().zero_()
    assert evaluator.sums().dtype == torch.float64 and evaluator.sums().ndim == 1
    assert evaluator.results(evaluator.sums())["top1"] == 100
