"""Networks that do not fit in memory are rejected before their weights are allocated."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from paceline.commands.configure import configure
from paceline.core.errors import UserError
from paceline.data.source import open_sources
from paceline.runs.recipe import make_recipe
from paceline.training import build
from paceline.training.build import LARGE_BYTES, WeightsLimit, check_training_fits


def test_a_layer_that_is_larger_than_the_free_memory_is_rejected() -> None:
    with WeightsLimit("mine"), pytest.raises(UserError, match=r"^recipe 'mine': the next layer needs 4,000,000"):
        nn.Linear(10**6, 10**9, bias=False)
    with WeightsLimit("mine"), pytest.raises(UserError, match="the next layer needs"):
        torch.zeros(10**20)  # more elements than torch can count
    with WeightsLimit("mine"), torch.device("meta"):
        assert nn.Linear(10**6, 10**9).weight.is_meta, "a layer without data is accepted"


def test_sizes_may_be_given_in_any_form_and_initial_weights_do_not_change() -> None:
    with WeightsLimit("mine"):
        made = [torch.empty(2, 3), torch.zeros((2, 3)), torch.ones(size=[2, 3]), torch.rand(torch.Size([2, 3]))]
        assert [list(one.shape) for one in made] == [[2, 3]] * 4
        assert torch.zeros(()).shape == () and torch.empty(np.int64(2)).shape == (2,)
    torch.manual_seed(3)
    free = nn.Conv2d(3, 8, 3)
    torch.manual_seed(3)
    with WeightsLimit("mine"):
        assert torch.equal(free.weight, nn.Conv2d(3, 8, 3).weight)


def test_layers_that_fit_one_by_one_but_not_together_are_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[torch.Tensor] = []
    monkeypatch.setattr(build, "free_host_bytes", lambda: 3 * LARGE_BYTES - sum(layer.nbytes for layer in made))
    with WeightsLimit("mine"), pytest.raises(UserError, match=r"^recipe 'mine': the next layer needs 0\.1 GB"):
        while True:
            made.append(torch.empty(LARGE_BYTES // 16))  # not touched, so it needs no memory
    assert len(made) > 4


@pytest.mark.parametrize(
    ("settings", "copies"),
    [({"optimizer": "sgd", "momentum": 0.0}, 1), ({"optimizer": "sgd"}, 2), ({"ema_half_life": "9 images"}, 4)],
)
def test_a_network_is_rejected_if_its_gradients_and_state_do_not_fit(
    monkeypatch: pytest.MonkeyPatch, tiny: str, settings: dict[str, Any], copies: int
) -> None:
    config = configure(tiny, {"accelerator": "cpu", "optimizer": "adam", **settings})
    recipe = make_recipe(config, open_sources(config))
    recipe.classifier = nn.Linear(100, LARGE_BYTES // 100, bias=False, device="meta")
    needed = copies * recipe.classifier.weight.nbytes
    monkeypatch.setattr(build, "free_host_bytes", lambda: 2 * needed)
    check_training_fits(config, recipe, 2)
    message = (
        rf"gradients, optimizer state and EMA need {3 * needed / 1e9:.1f} GB of memory, but {2 * needed / 1e9:.1f}"
    )
    with pytest.raises(UserError, match=message):
        check_training_fits(config, recipe, 3)
