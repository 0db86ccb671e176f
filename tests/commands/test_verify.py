"""`verify` explains differences between weights that come from the optimizer, not from the strategy."""

from __future__ import annotations

import pytest
import torch

from paceline.commands.configure import configure
from paceline.commands.verify import Difference, compare, explain


def found(kind: str, value: float) -> Difference:
    tolerance = 1e-9 if kind == "weights" else 1e-12
    return Difference("ddp", kind, "classifier", value, tolerance, worst="conv.weight" if value > tolerance else "")


@pytest.mark.parametrize(
    ("optimizer", "gradients", "weights", "is_explained"),
    [
        ("adamw", 1e-15, 4.3e-9, True),
        ("adamw", 1e-15, 1e-12, False),  # nothing to explain
        ("adamw", 1e-6, 4.3e-9, False),  # the gradients differ, too
        ("sgd", 1e-15, 4.3e-9, False),
    ],
)
def test_rounding_errors_enlarged_by_adam_are_explained(optimizer, gradients, weights, is_explained):
    config = configure("classification", {"optimizer": optimizer, "data": "digits"})
    explanation = explain(config, [found("gradients", gradients), found("weights", weights)])
    assert ("add --set optimizer=sgd" in explanation) == is_explained
    assert bool(explanation) == is_explained


def test_empty_tensors_are_not_compared():
    trace = {"weights//generator/weight": torch.ones(2), "weights//generator/empty": torch.ones(0)}
    (difference,) = compare({"single": trace, "ddp": trace}, 1e-9)
    assert difference.value == 0 and difference.ok
