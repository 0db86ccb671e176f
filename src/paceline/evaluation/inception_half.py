"""The 2015 Inception network in float16 on a GPU, with Triton kernels for convolution and pooling."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

from paceline.evaluation.inception import AveragedConvReLU, Branches, ConvReLU

# Triton determines the types of kernel arguments itself.
# mypy: disable-error-code="untyped-decorator, no-untyped-def"


PIXELS, CHANNELS = 128, 64  # size of the tile that one Triton program computes
POOLED = 32  # pixels per tile in pooling


class TwoHalves(NamedTuple):
    """Convolution weights, stored as `(high + low) · scale` in two float16 numbers and zero-padded to full tiles."""

    high: Tensor  # shape [tap, input channel, output channel]
    low: Tensor
    scale: Tensor  # a power of two per output channel, so that even the smallest weights keep their precision
    bias: Tensor
    kernel: tuple[int, int]
    channels: tuple[int, int]  # numbers of input and output channels, excluding padding
    depth: int  # input channels that a Triton program multiplies at a time


def two_halves(weight: Tensor, bias: Tensor) -> TwoHalves:
    """Convert float32 weights [out, in, height, width] to the kernel's format, which keeps about 22 bits."""
    num_out, num_in, height, width = weight.shape
    depth = 64 if num_in % 64 == 0 else 32
    exponent = torch.frexp(weight.abs().amax(dim=(1, 2, 3)))[1]
    exact = torch.ldexp(weight, -exponent[:, None, None, None]).permute(2, 3, 1, 0).reshape(-1, num_in, num_out)
    whole = weight.new_zeros(height * width, _up_to(num_in, depth), _up_to(num_out, CHANNELS))
    whole[:, :num_in, :num_out] = exact
    high = whole.half()
    scale, padded_bias = (weight.new_zeros(whole.shape[2]) for _ in range(2))
    scale[:num_out], padded_bias[:num_out] = torch.ldexp(torch.ones_like(bias), exponent), bias
    return TwoHalves(high, (whole - high).half(), scale, padded_bias, (height, width), (num_in, num_out), depth)


def convolve(x: Tensor, weights: TwoHalves, out: Tensor, stride: int, padding: tuple[int, int], *, relu: bool) -> None:
    """Write the convolution of `x` to `out` (float16 or float32). Both may be slices of wider tensors."""
    (count, in_h, in_w, _), (_, out_h, out_w, _) = x.shape, out.shape
    (num_in, num_out), pixels = weights.channels, count * out_h * out_w
    programs = triton.cdiv(pixels, PIXELS) * triton.cdiv(num_out, CHANNELS)
    _convolve[programs,](
        *(x, weights.high, weights.low, weights.scale, weights.bias, out),
        *(pixels, out_h, out_w, in_h, in_w, num_in, num_out, x.stride(2), out.stride(2)),
        *(*weights.kernel, stride, *padding, weights.high.shape[2]),
        **dict(WHOLE=num_in % weights.depth == 0, RELU=relu, M=PIXELS, N=CHANNELS, K=weights.depth),
        **dict(num_warps=4, num_stages=3 if weights.depth == 64 else 4),
    )


def pool(x: Tensor, out: Tensor, stride: int, padding: int, *, average: bool) -> None:
    """Max-pool `x` over 3×3 windows into `out`, or average-pool it and apply ReLU; padding is ignored."""
    (_, in_h, in_w, _), (count, out_h, out_w, channels) = x.shape, out.shape
    pixels = count * out_h * out_w
    programs = triton.cdiv(pixels, POOLED) * triton.cdiv(channels, CHANNELS)
    _pool[programs,](
        *(x, out, pixels, out_h, out_w, in_h, in_w, channels, x.stride(2), out.stride(2), stride, padding),
        **dict(AVERAGE=average, M=POOLED, N=CHANNELS),
    )


def _up_to(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


# By default, Triton compiles separate kernels for sizes that are 1 or multiples of 16.
_SIZES = ["pixels", "out_h", "out_w", "in_h", "in_w", "stride"]


# 32-bit offsets are enough: the widest layer has 691 million values for 500 images.
@triton.jit(do_not_specialize=[*_SIZES, "height", "width", "pad_h", "pad_w"])
def _convolve(
    x, high, low, scale, bias, out,
    pixels, out_h, out_w, in_h, in_w, num_in, num_out, x_step, out_step,
    height, width, stride, pad_h, pad_w, padded_out,
    WHOLE: tl.constexpr, RELU: tl.constexpr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """Compute a tile of M pixels and N channels from K input channels of one tap at a time."""
    columns = tl.cdiv(num_out, N)
    pixel = tl.program_id(0) // columns * M + tl.arange(0, M)
    channel = tl.program_id(0) % columns * N + tl.arange(0, N)
    image, place = pixel // (out_h * out_w), pixel % (out_h * out_w)
    row, column = place // out_w * stride - pad_h, place % out_w * stride - pad_w
    first = (image * in_h + row) * in_w + column
    k = tl.arange(0, K)
    weight = k[:, None] * padded_out + channel[None, :]
    blocks = tl.cdiv(num_in, K)
    sums = tl.zeros((M, N), dtype=tl.float32)
    for step in range(height * width * blocks):
        down, right = step // blocks // width, step // blocks % width
        inside = (row + down >= 0) & (row + down < in_h) & (column + right >= 0) & (column + right < in_w)
        there = (inside & (pixel < pixels))[:, None]
        some = step % blocks * K + k
        if not WHOLE:
            there = there & (some < num_in)[None, :]
        values = tl.load(x + ((first + down * in_w + right) * x_step)[:, None] + some[None, :], mask=there, other=0.0)
        sums = tl.dot(values, tl.load(high + step * K * padded_out + weight), sums)
        sums = tl.dot(values, tl.load(low + step * K * padded_out + weight), sums)
    sums = sums * tl.load(scale + channel)[None, :] + tl.load(bias + channel)[None, :]
    if RELU:
        sums = tl.maximum(sums, 0.0)
    inside = (pixel < pixels)[:, None] & (channel < num_out)[None, :]
    tl.store(out + (pixel * out_step)[:, None] + channel[None, :], sums.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=[*_SIZES, "padding"])
def _pool(
    x, out, pixels, out_h, out_w, in_h, in_w, channels, x_step, out_step, stride, padding,
    AVERAGE: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Pool a tile of M pixels and N channels."""
    columns = tl.cdiv(channels, N)
    pixel = tl.program_id(0) // columns * M + tl.arange(0, M)
    channel = (tl.program_id(0) % columns * N + tl.arange(0, N))[None, :]
    image, place = pixel // (out_h * out_w), pixel % (out_h * out_w)
    row, column = place // out_w * stride - padding, place % out_w * stride - padding
    there = (pixel < pixels)[:, None] & (channel < channels)
    neutral = 0.0 if AVERAGE else float("-inf")
    result = tl.full((M, N), neutral, dtype=tl.float32)
    count = tl.zeros((M,), dtype=tl.float32)
    for tap in tl.static_range(9):
        down, right = row + tap // 3, column + tap % 3
        inside = (down >= 0) & (down < in_h) & (right >= 0) & (right < in_w)
        at = (((image * in_h + down) * in_w + right) * x_step)[:, None] + channel
        value = tl.load(x + at, mask=inside[:, None] & there, other=neutral).to(tl.float32)
        result = result + value if AVERAGE else tl.maximum(result, value)
        count += inside.to(tl.float32)
    if AVERAGE:
        result = tl.maximum(result / tl.maximum(count, 1.0)[:, None], 0.0)  # the count is 0 beyond the last pixel
    tl.store(out + (pixel * out_step)[:, None] + channel, result.to(out.dtype.element_ty), mask=there)


Shape = tuple[int, int, int]  # height, width, channels


class Half:
    """The whole network, from float32 images [n, 3, h, w] to float32 features [n, c]."""

    def __init__(self, network: nn.Sequential) -> None:
        # The first layer stays in float32, since three input channels are too few for tensor cores.
        self.first, *middle, self.mean = network
        self.middle = nn.Sequential(*middle)
        convolutions = [module for module in self.middle.modules() if isinstance(module, ConvReLU)]
        self.weights = {module: two_halves(module.weight, module.bias) for module in convolutions}

    def __call__(self, images: Tensor) -> Tensor:
        # Triton computes on the current GPU, so make it the one that holds the images.
        with torch.cuda.device_of(images):  # type: ignore[no-untyped-call, unused-ignore]
            x = self.first(images).permute(0, 2, 3, 1).to(torch.float16, memory_format=torch.contiguous_format)
            features: Tensor = self.mean(self._compute(self.middle, x).permute(0, 3, 1, 2))
            return features

    def _compute(self, module: nn.Module, x: Tensor, out: Tensor | None = None) -> Tensor:
        """Return a module's output; `out`, if given, receives it and may be a slice of a wider tensor's channels."""
        if isinstance(module, nn.Sequential):
            *others, last = module
            for part in others:
                x = self._compute(part, x)
            return self._compute(last, x, out)
        out = x.new_empty(len(x), *output_shape(module, _shape_of(x))) if out is None else out
        if isinstance(module, Branches):
            widths = [output_shape(branch, _shape_of(x))[2] for branch in module.branches]
            for branch, channels in zip(module.branches, torch.split(out, widths, dim=3), strict=True):
                self._compute(branch, x, channels)
        elif isinstance(module, AveragedConvReLU):
            sums = torch.empty(out.shape, dtype=torch.float32, device=x.device)
            convolve(x, self.weights[module], sums, module.stride[0], module.padding, relu=False)
            pool(sums, out, 1, 1, average=True)
        elif isinstance(module, ConvReLU):
            convolve(x, self.weights[module], out, module.stride[0], module.padding, relu=True)
        else:
            stride, padding = _pooling(module)
            pool(x, out, stride, padding, average=False)
        return out


def output_shape(module: nn.Module, before: Shape) -> Shape:
    """Return the shape of a module's output for one image."""
    if isinstance(module, nn.Sequential):
        for part in module:
            before = output_shape(part, before)
        return before
    if isinstance(module, Branches):
        shapes = [output_shape(branch, before) for branch in module.branches]
        return *shapes[0][:2], sum(channels for *_, channels in shapes)
    if isinstance(module, ConvReLU):
        (channels, _, *taps), stride, paddings = module.weight.shape, module.stride[0], module.padding
    else:
        stride, padding = _pooling(module)
        channels, taps, paddings = before[2], [3, 3], (padding, padding)
    height, width = (
        (side + 2 * padding - tap) // stride + 1 for side, padding, tap in zip(before[:2], paddings, taps, strict=True)
    )
    return height, width, channels


def _pooling(module: nn.Module) -> tuple[int, int]:
    """Return the stride and the padding of a 3×3 max pool."""
    assert isinstance(module, nn.MaxPool2d) and module.kernel_size == 3
    assert isinstance(module.stride, int) and isinstance(module.padding, int)
    return module.stride, module.padding


def _shape_of(x: Tensor) -> Shape:
    _, height, width, channels = x.shape
    return height, width, channels
