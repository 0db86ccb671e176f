"""Learners (the optimizer, schedule and EMA for a network) in special cases."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from paceline.config.settings import LearnerSettings
from paceline.core.errors import UserError
from paceline.parallel.precision import Precision
from paceline.training.learner import Learner


def make(network: nn.Module, precision: str = "fp32", **settings: object) -> Learner:
    chosen = LearnerSettings(**({"optimizer": "sgd", "lr": 0.1} | settings))  # type: ignore[arg-type]
    learner = Learner("network", network, chosen, lambda images: chosen.lr, Precision(precision, "cpu"), 0)
    learner.set_rate(0)
    return learner


def test_a_first_step_that_the_fp16_scaler_skips_has_no_effect() -> None:
    network = nn.Linear(3, 2)
    before = network.weight.detach().clone()
    learner = make(network, "fp16")
    learner.scale(network(torch.ones(1, 3)).sum() * torch.inf).backward()
    learner.step()
    assert torch.equal(network.weight, before)
    learner.scale(network(torch.ones(1, 3)).sum()).backward()
    learner.step()
    # The first Nesterov step is the gradient (1) plus 0.9 times the momentum buffer (also 1).
    assert torch.allclose(network.weight, before - 0.1 * 1.9)


def test_frozen_parameters_stay_unchanged() -> None:
    network = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    network[0].requires_grad_(False)
    frozen = network[0].weight.detach().clone()
    learner = make(network, weight_decay=0.1)
    network(torch.ones(1, 3)).sum().backward()
    learner.step()
    assert torch.equal(network[0].weight, frozen) and list(learner.named) == ["1.weight", "1.bias"]


def test_a_network_without_trainable_parameters_is_rejected() -> None:
    with pytest.raises(UserError, match="nothing to train"):
        make(nn.Linear(2, 2).requires_grad_(False))


def test_layer_decay_lowers_the_learning_rate_towards_the_input() -> None:
    network = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.BatchNorm1d(3), nn.Linear(3, 2))
    learner = make(network, layer_decay=0.5, decay_norms=False, weight_decay=0.1)
    rates = {id(p): group["lr"] for group in learner.optimizer.param_groups for p in group["params"]}
    assert {name: rates[id(parameter)] for name, parameter in learner.named.items()} == {
        **dict.fromkeys(("0.weight", "0.bias"), 0.025),
        **dict.fromkeys(("2.weight", "2.bias"), 0.05),
        **dict.fromkeys(("3.weight", "3.bias"), 0.1),
    }
    decays = {id(p): group["weight_decay"] for group in learner.optimizer.param_groups for p in group["params"]}
    assert all(decays[id(p)] == (0.1 if p.ndim > 1 else 0) for p in learner.parameters)


def test_a_layer_decay_of_one_leaves_one_group_per_weight_decay() -> None:
    learner = make(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2)))
    (group,) = learner.optimizer.param_groups
    assert [id(p) for p in group["params"]] == [id(p) for p in learner.parameters] and group["lr"] == 0.1
