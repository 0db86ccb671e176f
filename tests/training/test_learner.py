"""Learners (the optimizer, schedule and EMA of a network) in special cases, and their burn-in."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from paceline.config.settings import LearnerSettings
from paceline.contracts.recipe import Clock
from paceline.core.errors import UserError
from paceline.parallel.precision import Precision
from paceline.parallel.torch_internals import TorchDispatchMode
from paceline.training.build import schedule_of
from paceline.training.learner import Learner, ScheduledAdam


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


def test_frozen_parameters_stay_unchanged_and_a_frozen_network_is_rejected() -> None:
    network = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    network[0].requires_grad_(False)
    frozen = network[0].weight.detach().clone()
    learner = make(network, weight_decay=0.1)
    network(torch.ones(1, 3)).sum().backward()
    learner.step()
    assert torch.equal(network[0].weight, frozen) and list(learner.named) == ["1.weight", "1.bias"]
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
    assert len(make(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))).optimizer.param_groups) == 1


def learner_of(network: nn.Module, burn_in: int, half_life: int = 0, **settings: object) -> Learner:
    chosen = LearnerSettings(**settings)  # type: ignore[arg-type]
    rate = schedule_of(chosen, 1.0, epoch=100, step=10, total=1000, burn_in=burn_in)
    return Learner("network", network, chosen, rate, Precision("fp64", "cpu"), half_life, burn_in)


def test_the_learning_rate_and_beta2_follow_the_burn_in() -> None:
    values = [Clock(images, 10, 400).anneal(3.0, 1.0) for images in (0, 200, 400, 900)]  # half a cosine
    assert values == pytest.approx([3.0, 2.0, 1.0, 1.0]) and Clock(0, 10).anneal(3.0, 1.0) == 1.0
    learner = learner_of(nn.Linear(2, 1).double(), 400, lr=0.1, burn_in_lr=4.0, beta2=0.99, burn_in_beta2=0.9)
    assert isinstance(learner.optimizer, ScheduledAdam)
    found = []
    for images in (0, 200, 400, 800):
        learner.set_rate(images)
        found.append((learner.optimizer.param_groups[0]["lr"], learner.optimizer.beta2.item()))
    assert found == [pytest.approx(pair) for pair in ((0.4, 0.9), (0.25, 0.945), (0.1, 0.99), (0.1, 0.99))]


@pytest.mark.parametrize("optimizer", ["adam", "adamw"])
def test_with_a_constant_beta2_the_weights_equal_those_of_torch(optimizer: str) -> None:
    torch.manual_seed(0)
    ours, theirs = nn.Linear(3, 2).double(), nn.Linear(3, 2).double()
    theirs.load_state_dict(ours.state_dict())
    settings = {"optimizer": optimizer, "beta1": 0.5, "beta2": 0.9, "weight_decay": 0.1}
    learners = [learner_of(ours, 100, **settings, burn_in_beta2=0.9), learner_of(theirs, 0, **settings)]
    for number in range(5):
        data = torch.randn(4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(number))
        for network, learner in zip((ours, theirs), learners, strict=True):
            learner.set_rate(10 * number)
            network(data).square().sum().backward()
            learner.step()
    assert type(learners[0].optimizer) is not type(learners[1].optimizer)
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.allclose(one, other, rtol=1e-12, atol=1e-14)


def test_the_ema_follows_the_weights_at_first_and_then_averages_them() -> None:
    network = nn.Linear(1, 1, bias=False).double()
    learner = learner_of(network, 100, half_life=50)
    learner.set_rate(0)
    network.weight.data.fill_(3.0)
    learner.update_ema(10)
    assert learner.ema[0].item() == 3.0  # the half-life is 0 at the start
    learner.set_rate(100)
    network.weight.data.fill_(5.0)
    learner.update_ema(50)
    assert learner.ema[0].item() == pytest.approx(4.0)


class _Reads(TorchDispatchMode):
    """Counts how often a value is read on the host, for which a GPU would have to be waited for."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("optimizer", "clip"), [("adam", 0.5), ("adamw", 0.0)])
def test_in_fp16_a_scheduled_beta2_skips_overflows_without_waiting_for_the_device(optimizer: str, clip: float) -> None:
    settings = LearnerSettings(optimizer=optimizer, lr=0.1, weight_decay=0.1, clip=clip, burn_in_beta2=0.9)  # type: ignore[arg-type]
    networks, learners = [], []
    for supports in (True, False):  # without support, the GradScaler itself decides on the host
        torch.manual_seed(0)
        networks.append(nn.Linear(3, 2))
        rate = schedule_of(settings, 1.0, epoch=100, step=10, total=1000, burn_in=100)
        learners.append(Learner("network", networks[-1], settings, rate, Precision("fp16", "cpu"), 0, 100))
        learners[-1].optimizer._step_supports_amp_scaling = supports  # type: ignore[attr-defined]
    counts = []
    for network, learner in zip(networks, learners, strict=True):
        for number in range(6):
            learner.set_rate(10 * number)
            data = torch.randn(4, 3, generator=torch.Generator().manual_seed(number))
            learner.scale(network(data).square().sum()).backward()
            if number in (0, 3):
                assert network.weight.grad is not None
                network.weight.grad[0, 0] = torch.inf if number else torch.nan
            with _Reads() as reads:
                learner.step()
        counts.append(reads.count)
    assert counts[0] == 0 < counts[1]
    for one, other in zip(networks[0].parameters(), networks[1].parameters(), strict=True):
        assert torch.equal(one, other)
        states = [learner.optimizer.state[p] for learner, p in zip(learners, (one, other), strict=True)]
        assert all(torch.equal(states[0][name], states[1][name]) for name in states[0]) and states[0]["step"] == 4
    assert learners[0].scaler.get_scale() == learners[1].scaler.get_scale() < 65536
