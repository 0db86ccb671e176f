"""LayerNorm over channels: the fused layer replaces the slow one of other projects."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
from torch import Tensor, nn

from paceline.models.adapters import ChannelNorm, fuse_channel_norms


class LayerNorm2d(nn.Module):
    """The layer as in NAFNet, in elementary operations."""

    def __init__(self, channels: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(channels, dtype=torch.float64))
        self.bias = nn.Parameter(torch.rand(channels, dtype=torch.float64))
        self.eps = eps

    def forward(self, images: Tensor) -> Tensor:
        centred = images - images.mean(1, keepdim=True)
        normal = centred / (centred.square().mean(1, keepdim=True) + self.eps).sqrt()
        return normal * self.weight[:, None, None] + self.bias[:, None, None]


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_the_fused_layer_has_the_same_results_and_gradients(memory_format: torch.memory_format) -> None:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Identity(), LayerNorm2d(5))
    images = torch.rand(2, 5, 3, 4, dtype=torch.float64).contiguous(memory_format=memory_format).requires_grad_()
    found = []
    for one in (deepcopy(network), fuse_channel_norms(network)):
        made = one(images)
        made.square().sum().backward()
        found.append([made, images.grad, *(parameter.grad for parameter in one.parameters())])
        images.grad = None
        one.zero_grad()
    assert isinstance(network[1], ChannelNorm)
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_replacing_layers_keeps_the_names_and_values_of_the_weights() -> None:
    network = nn.Sequential(LayerNorm2d(3), nn.Sequential(LayerNorm2d(2)))
    before = dict(network.state_dict())
    after = fuse_channel_norms(network).state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_torchs_own_layers_are_not_replaced() -> None:
    network = nn.Sequential(nn.LayerNorm(4), nn.GroupNorm(1, 4))
    fuse_channel_norms(network)
    assert [type(one) for one in network] == [nn.LayerNorm, nn.GroupNorm]
