"""SmoothConv2d computes the same results and gradients as nn.Conv2d, to the second order."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from paceline.models.twice_differentiable import SmoothConv2d


def second_order(layer: nn.Conv2d, images: torch.Tensor) -> list[torch.Tensor]:
    """Return the result, and the gradients of a function of the result and its gradient."""
    images = images.clone().requires_grad_(True)
    result = layer(images)
    (gradient,) = torch.autograd.grad(result.square().sum(), images, create_graph=True)
    (gradient.pow(3).sum() + result.sin().sum()).backward()
    assert images.grad is not None
    return [
        result.detach(),
        gradient.detach(),
        images.grad,
        *(p.grad for p in layer.parameters() if p.grad is not None),
    ]


@pytest.mark.parametrize(("groups", "bias"), [(1, True), (2, True), (6, False)])
def test_results_and_gradients_equal_those_of_conv2d(groups: int, bias: bool) -> None:
    torch.manual_seed(0)
    smooth = SmoothConv2d(6, 12, 3, padding=1, groups=groups, bias=bias).double()
    plain = nn.Conv2d(6, 12, 3, padding=1, groups=groups, bias=bias).double()
    plain.load_state_dict(smooth.state_dict())
    images = torch.randn(2, 6, 5, 4, dtype=torch.float64)
    for ours, theirs in zip(second_order(smooth, images), second_order(plain, images), strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-12, atol=1e-12)


def test_second_order_gradients_equal_finite_differences() -> None:
    layer = SmoothConv2d(2, 2, 3, padding=1, groups=2).double()
    images = torch.randn(1, 2, 3, 3, dtype=torch.float64, requires_grad=True)

    def call(images: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = torch.func.functional_call(layer, {"weight": weight}, (images,))
        return result.sin()

    assert torch.autograd.gradgradcheck(call, (images, layer.weight))
