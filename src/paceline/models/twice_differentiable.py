"""Convolutions whose second-order gradients are as fast as their first-order gradients, for gradient penalties.

A convolution y = C(x, w) is linear in the image x and in the weight w. So are the two parts of its gradient, the
transposed convolution T(g, w) and the weight gradient W(x, g). Differentiating any of the three gives the other two.
PyTorch instead differentiates the gradient of a grouped convolution group by group, with one large kernel per group.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function


class SmoothConv2d(nn.Conv2d):
    """An nn.Conv2d without stride that is fast to differentiate twice."""

    def forward(self, input: Tensor) -> Tensor:
        if torch.compiler.is_compiling():  # a compiled network cannot be differentiated twice
            return super().forward(input)
        assert self.stride == self.dilation == (1, 1) and isinstance(self.padding, tuple)
        result: Tensor = _Convolution.apply(input, self.weight.to(input.dtype), self.padding[0], self.groups)
        return result if self.bias is None else result + self.bias.to(input.dtype)[:, None, None]


class _Convolution(Function):
    """C(x, w)."""

    @staticmethod
    def forward(ctx: Any, image: Tensor, weight: Tensor, padding: int, groups: int) -> Tensor:
        ctx.save_for_backward(image, weight)
        ctx.padding, ctx.groups = padding, groups
        return F.conv2d(image, weight, padding=padding, groups=groups)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        image, weight = ctx.saved_tensors
        options = ctx.padding, ctx.groups
        for_image = _Transposed.apply(gradient, weight, *options) if ctx.needs_input_grad[0] else None
        for_weight = _WeightGradient.apply(image, gradient, weight, *options) if ctx.needs_input_grad[1] else None
        return for_image, for_weight, None, None


class _Transposed(Function):
    """T(g, w), the gradient of C with respect to x."""

    @staticmethod
    def forward(ctx: Any, gradient: Tensor, weight: Tensor, padding: int, groups: int) -> Tensor:
        ctx.save_for_backward(gradient, weight)
        ctx.padding, ctx.groups = padding, groups
        return F.conv_transpose2d(gradient, weight, padding=padding, groups=groups)

    @staticmethod
    def backward(ctx: Any, second: Tensor) -> Any:
        gradient, weight = ctx.saved_tensors
        options = ctx.padding, ctx.groups
        for_gradient = _Convolution.apply(second, weight, *options) if ctx.needs_input_grad[0] else None
        for_weight = _WeightGradient.apply(second, gradient, weight, *options) if ctx.needs_input_grad[1] else None
        return for_gradient, for_weight, None, None


class _WeightGradient(Function):
    """W(x, g), the gradient of C with respect to w; the values of `weight` are not used."""

    @staticmethod
    def forward(ctx: Any, image: Tensor, gradient: Tensor, weight: Tensor, padding: int, groups: int) -> Tensor:
        ctx.save_for_backward(image, gradient)
        ctx.padding, ctx.groups = padding, groups
        both, one, none = [padding, padding], [1, 1], [0, 0]
        mask = [False, True, False]  # only the gradient of the weight
        found: Tensor = torch.ops.aten.convolution_backward(
            gradient, image, weight, None, one, both, one, False, none, groups, mask
        )[1]
        return found

    @staticmethod
    def backward(ctx: Any, second: Tensor) -> Any:
        image, gradient = ctx.saved_tensors
        options = ctx.padding, ctx.groups
        for_image = _Transposed.apply(gradient, second, *options) if ctx.needs_input_grad[0] else None
        for_gradient = _Convolution.apply(image, second, *options) if ctx.needs_input_grad[1] else None
        return for_image, for_gradient, None, None, None
