"""The wait for other processes starts after the last of a process's own gradients, in every phase."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from paceline.parallel.batchnorm import waiting
from paceline.training import step
from paceline.training.step import GradientWait

WORK_SECONDS = 0.1
now = [1.0]  # the time that `GradientWait` reads


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let time pass only in `work`, whatever else the machine does."""
    monkeypatch.setattr(step, "perf_counter", lambda: now[0])


def work() -> None:
    now[0] += WORK_SECONDS


class SlowBackward(torch.autograd.Function):
    """Returns its input; its backward pass takes time."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:  # type: ignore[override]
        work()
        return gradient


def seconds_waited(wait: GradientWait, phase: str, layers: list[nn.Module]) -> float:
    """Run a backward pass that works between the gradients of two layers; return the time that counts as waiting."""
    before = waiting.seconds
    layers[1](SlowBackward.apply(layers[0](torch.ones(1, 2)))).sum().backward()
    wait.end_backward(phase)
    return waiting.seconds - before


def test_work_between_two_gradients_is_not_a_wait_whatever_the_order_of_a_phase() -> None:
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    wait = GradientWait([*first.parameters(), *second.parameters()], ["one", "other"])
    orders = {"one": [first, second], "other": [second, first]}
    for phase in ("one", "one", "other", "one", "other"):  # a phase may run less often than another
        assert seconds_waited(wait, phase, orders[phase]) == 0, phase


def test_the_time_after_the_last_gradient_is_a_wait() -> None:
    layer = nn.Linear(2, 2)
    wait = GradientWait(layer.parameters(), ["only"])
    for _ in range(3):
        before = waiting.seconds
        layer(torch.ones(1, 2)).sum().backward()
        work()
        wait.end_backward("only")
        assert waiting.seconds - before == pytest.approx(WORK_SECONDS)
