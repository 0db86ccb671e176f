"""Paceline's replacements for the layers of torch and of other projects compute the same results as the originals."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.models.layers import ChannelNorm, FromOnePixel, ToFewChannels, ToOnePixel, fuse_channel_norms

Replacement = FromOnePixel | ToOnePixel | ToFewChannels
LAYERS: list[tuple[Replacement, tuple[int, ...], Callable[..., Tensor]]] = [
    *(
        (FromOnePixel(5, 6, side, bias=bias), (5, 1, 1), F.conv_transpose2d)
        for side in (2, 4)
        for bias in (True, False)
    ),
    *((ToOnePixel(6, 2, side), (6, side, side), F.conv2d) for side in (2, 4)),
    (ToFewChannels(6, 3, 9, padding=4), (6, 11, 14), partial(F.conv2d, padding=4)),
    (ToFewChannels(6, 3, 7), (6, 11, 14), F.conv2d),
    (ToFewChannels(6, 3, 5, padding=(2, 1), bias=False), (6, 11, 14), partial(F.conv2d, padding=(2, 1))),
]


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize(("layer", "shape", "original"), LAYERS)
def test_a_layer_has_the_results_and_gradients_of_the_original(layer, shape, original, layout) -> None:
    layer = deepcopy(layer).double().to(memory_format=layout)
    images = torch.randn(3, *shape, dtype=torch.float64).to(memory_format=layout).requires_grad_()
    made, expected = layer(images), original(images, layer.weight, layer.bias)
    torch.testing.assert_close(made, expected, rtol=1e-12, atol=1e-12)
    weights, of = torch.randn_like(expected), (images, *layer.parameters())
    gradients = (torch.autograd.grad((result * weights).sum(), of) for result in (made, expected))
    torch.testing.assert_close(*gradients, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("size", [(1, 1), (3, 20), (8, 5), (20, 2)])
def test_the_to_few_channels_layer_takes_images_smaller_than_its_kernel(size: tuple[int, int]) -> None:
    layer, images = ToFewChannels(6, 3, 9, padding=4), torch.randn(2, 6, *size)
    torch.testing.assert_close(layer(images), F.conv2d(images, layer.weight, layer.bias, padding=4))


def test_the_to_few_channels_layer_adds_in_full_precision() -> None:
    layer, images = ToFewChannels(6, 3, 9, padding=4), torch.randn(2, 6, 16, 16)
    with torch.autocast("cpu", torch.bfloat16):
        made = layer(images)
    assert made.dtype == torch.float32
    torch.testing.assert_close(made, layer(images), rtol=0.02, atol=0.02)


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
def test_a_fused_channel_norm_keeps_results_gradients_and_weights(memory_format: torch.memory_format) -> None:
    torch.manual_seed(0)
    network = nn.Sequential(nn.GroupNorm(1, 5).double(), nn.Sequential(LayerNorm2d(5)))
    images = torch.rand(2, 5, 3, 4, dtype=torch.float64).contiguous(memory_format=memory_format).requires_grad_()
    found = []
    for part in (deepcopy(network), fuse_channel_norms(network)):
        made = part(images)
        found.append([made, *torch.autograd.grad(made.square().sum(), (images, *part.parameters())), part.state_dict()])
    assert type(network[0]) is nn.GroupNorm and isinstance(network[1][0], ChannelNorm)  # type: ignore[index]
    torch.testing.assert_close(*found, rtol=1e-12, atol=1e-12)
