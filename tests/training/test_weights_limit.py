"""Networks that do not fit in memory are rejected before their weights are allocated."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from paceline.core.errors import UserError
from paceline.training.weights_limit import WeightsLimit


def test_a_layer_that_is_larger_than_the_free_memory_is_rejected() -> None:
    with WeightsLimit("mine"), pytest.raises(UserError, match=r"^recipe 'mine': one layer needs 4,000,000"):
        nn.Linear(10**6, 10**9, bias=False)
    with WeightsLimit("mine"), pytest.raises(UserError, match="one layer needs"):
        torch.zeros(10**20)  # more elements than torch can count


def test_a_layer_without_data_is_accepted() -> None:
    with WeightsLimit("mine"), torch.device("meta"):
        assert nn.Linear(10**6, 10**9).weight.is_meta


def test_sizes_may_be_given_in_any_form() -> None:
    with WeightsLimit("mine"):
        made = [torch.empty(2, 3), torch.zeros((2, 3)), torch.ones(size=[2, 3]), torch.rand(torch.Size([2, 3]))]
        assert [list(one.shape) for one in made] == [[2, 3]] * 4
        assert torch.zeros(()).shape == () and torch.empty(np.int64(2)).shape == (2,)


def test_initial_weights_are_the_same_as_without_the_limit() -> None:
    torch.manual_seed(3)
    free = nn.Conv2d(3, 8, 3)
    torch.manual_seed(3)
    with WeightsLimit("mine"):
        limited = nn.Conv2d(3, 8, 3)
    assert torch.equal(free.weight, limited.weight)
