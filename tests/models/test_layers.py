"""Paceline's replacements for torch layers compute the same results as the originals."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from paceline.models.layers import FromOnePixel, ToFewChannels, ToOnePixel


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("kernel", [2, 4])
@pytest.mark.parametrize("bias", [True, False])
def test_the_from_one_pixel_layer_equals_a_transposed_convolution(
    bias: bool, kernel: int, layout: torch.memory_format
) -> None:
    layer = FromOnePixel(5, 6, kernel, bias=bias).double().to(memory_format=layout)
    pixel = torch.randn(3, 5, 1, 1, dtype=torch.float64, requires_grad=True)
    expected = F.conv_transpose2d(pixel, layer.weight, layer.bias)
    torch.testing.assert_close(layer(pixel), expected, rtol=1e-12, atol=1e-12)
    assert_same_gradients(layer(pixel), expected, pixel, *layer.parameters())


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("kernel", [2, 4])
def test_the_to_one_pixel_layer_equals_a_convolution(kernel: int, layout: torch.memory_format) -> None:
    layer = ToOnePixel(6, 2, kernel).double().to(memory_format=layout)
    image = torch.randn(3, 6, kernel, kernel, dtype=torch.float64).to(memory_format=layout).requires_grad_()
    expected = F.conv2d(image, layer.weight, layer.bias)
    torch.testing.assert_close(layer(image), expected, rtol=1e-12, atol=1e-12)
    assert_same_gradients(layer(image), expected, image, *layer.parameters())


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize(("kernel", "padding", "bias"), [(9, 4, True), (7, 0, True), (5, (2, 1), False)])
def test_the_to_few_channels_layer_equals_a_convolution(kernel: int, padding: Any, bias: bool, layout: Any) -> None:
    layer = ToFewChannels(6, 3, kernel, padding=padding, bias=bias).double().to(memory_format=layout)
    images = torch.randn(2, 6, 11, 14, dtype=torch.float64).to(memory_format=layout).requires_grad_()
    expected = F.conv2d(images, layer.weight, layer.bias, padding=padding)
    torch.testing.assert_close(layer(images), expected, rtol=1e-12, atol=1e-12)
    assert_same_gradients(layer(images), expected, images, *layer.parameters())


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


def assert_same_gradients(found: torch.Tensor, expected: torch.Tensor, *of: torch.Tensor) -> None:
    weights = torch.randn_like(expected)
    ours = torch.autograd.grad((found * weights).sum(), of)
    for our, their in zip(ours, torch.autograd.grad((expected * weights).sum(), of), strict=True):
        torch.testing.assert_close(our, their, rtol=1e-12, atol=1e-12)
