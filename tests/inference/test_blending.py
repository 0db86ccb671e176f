"""`--interpolate`: weights between those of two models."""

import pytest
import torch

from paceline.core.errors import UserError
from paceline.inference.trained import interpolated


def test_floating_point_tensors_of_common_networks_are_interpolated():
    ours = {"generator.weight": torch.tensor([1.0, 2.0]), "generator.count": torch.tensor(7)}
    ours |= {"discriminator.weight": torch.tensor([5.0])}
    theirs = {"generator.weight": torch.tensor([3.0, 6.0]), "generator.count": torch.tensor(1)}
    mixed = interpolated(ours, theirs, 0.75, "other")
    assert mixed["generator.weight"].tolist() == [1.5, 3.0]
    assert mixed["generator.count"] == 7 and mixed["discriminator.weight"] == 5


@pytest.mark.parametrize(
    ("theirs", "message"),
    [
        ({"generator.weight": torch.zeros(3)}, "'generator.weight' does not match"),
        ({"generator.weight": torch.zeros(2), "generator.bias": torch.zeros(2)}, "'generator.bias' does not match"),
        ({"restorer.weight": torch.zeros(2)}, "no network in common"),
        ({"generator.weight": torch.zeros(2, dtype=torch.int32)}, "'generator.weight' does not match"),
        ({"generator.weight": torch.zeros(2, dtype=torch.complex64)}, "'generator.weight' does not match"),
        ({"generator.weight": torch.tensor([0, torch.nan])}, "'generator.weight' contains NaN"),
    ],
)
def test_different_networks_are_rejected(theirs, message):
    with pytest.raises(UserError, match=message):
        interpolated({"generator.weight": torch.zeros(2)}, theirs, 0.5, "other")
