"""The burn-in: learning rate, beta2 and EMA half-life change with the images seen, and resume exactly."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from paceline.config.settings import LearnerSettings
from paceline.contracts.phase import Clock
from paceline.parallel.precision import Precision
from paceline.training.learner import Learner
from paceline.training.schedule import schedule_of
from paceline.training.scheduled_adam import ScheduledAdam


def learner_of(network: nn.Module, burn_in: int, half_life: int = 0, **settings: object) -> Learner:
    chosen = LearnerSettings(**settings)  # type: ignore[arg-type]
    rate = schedule_of(chosen, 1.0, epoch=100, step=10, total=1000, burn_in=burn_in)
    return Learner("network", network, chosen, rate, Precision("fp64", "cpu"), half_life, burn_in)


def test_a_value_moves_along_half_a_cosine_and_then_stays() -> None:
    values = [Clock(images, 10, 400).anneal(3.0, 1.0) for images in (0, 200, 400, 900)]
    assert values == pytest.approx([3.0, 2.0, 1.0, 1.0])
    assert Clock(0, 10).anneal(3.0, 1.0) == 1.0


def test_the_learning_rate_and_beta2_follow_the_burn_in() -> None:
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
