"""A narrow Inception network in TorchScript, with the layer names and order of the real one."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

NARROW = 8  # channels in all layers except those in the last block


class Layer(nn.Module):
    """Convolution, BatchNorm without a scale, and ReLU, with the names used in the Inception file."""

    def __init__(
        self, channels: int, kernel: tuple[int, int], stride: int = 1, *, padded: bool = True, out: int = NARROW
    ) -> None:
        super().__init__()
        var = torch.rand(out) + 0.01
        spread = (3 * var / (channels * kernel[0] * kernel[1])).sqrt()  # keeps outputs from vanishing or exploding
        for name, value in {
            "weight": torch.randn(out, channels, *kernel) * spread[:, None, None, None],
            "beta": torch.randn(out) / 4,
            "mean": torch.randn(out) * var.sqrt() / 4,
            "var": var,
        }.items():
            self.register_buffer(name, value)
        self.stride, self.padding = stride, (kernel[0] // 2, kernel[1] // 2) if padded and stride == 1 else (0, 0)

    def forward(self, x: Tensor) -> Tensor:
        x = F.conv2d(x, self.weight, None, self.stride, self.padding)
        return F.batch_norm(x, self.mean, self.var, None, self.beta, False, 0.1, 0.001).relu()


class Block(nn.Module):
    """A module that concatenates the outputs of its children along the channel dimension."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([child(x) for child in self.children()], dim=1)


class LastBlock(nn.Module):
    """The last block, in which two of the towers split into branches."""

    def __init__(self, channels: int, pool: nn.Module, widths: tuple[int, ...]) -> None:
        super().__init__()
        self.conv = Layer(channels, (1, 1), out=widths[0])
        self.tower_conv = Layer(channels, (1, 1))
        self.tower_mixed_conv = Layer(NARROW, (1, 3), out=widths[1])
        self.tower_mixed_conv_1 = Layer(NARROW, (3, 1), out=widths[1])
        self.tower_1_conv = Layer(channels, (1, 1))
        self.tower_1_conv_1 = Layer(NARROW, (3, 3))
        self.tower_1_mixed_conv = Layer(NARROW, (1, 3), out=widths[1])
        self.tower_1_mixed_conv_1 = Layer(NARROW, (3, 1), out=widths[1])
        self.tower_2_pool = pool
        self.tower_2_conv = Layer(channels, (1, 1), out=widths[2])

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.tower_conv(x), self.tower_1_conv_1(self.tower_1_conv(x))
        towers = [self.tower_mixed_conv(a), self.tower_mixed_conv_1(a)]
        towers += [self.tower_1_mixed_conv(b), self.tower_1_mixed_conv_1(b)]
        return torch.cat([self.conv(x), *towers, self.tower_2_conv(self.tower_2_pool(x))], dim=1)


def named(parent: nn.Module, **children: nn.Module) -> nn.Module:
    for name, child in children.items():
        parent.add_module(name, child)
    return parent


def tower(channels: int, *kernels: tuple[int, int], stride: int = 1) -> nn.Module:
    layers = {}
    for number, kernel in enumerate(kernels):
        last = stride if number == len(kernels) - 1 else 1
        layers[f"conv_{number}" if number else "conv"] = Layer(NARROW if number else channels, kernel, last)
    return named(nn.Sequential(), **layers)


def file_network() -> nn.Module:
    """Return a narrow network with the names used in the Inception file."""

    def average() -> nn.Module:
        return nn.AvgPool2d(3, 1, 1, count_include_pad=False)

    def mixed(channels: int, first: list[tuple[int, int]], second: list[tuple[int, int]]) -> nn.Module:
        pooled = named(nn.Sequential(), pool=average(), conv=Layer(channels, (1, 1)))
        towers = {"tower": tower(channels, *first), "tower_1": tower(channels, *second), "tower_2": pooled}
        return named(Block(), conv=Layer(channels, (1, 1)), **towers)

    one, three, five, flat, high = (1, 1), (3, 3), (5, 5), (1, 7), (7, 1)
    wide = 4 * NARROW  # total channels in four branches
    after_3, after_8 = 2 * NARROW + wide, 2 * NARROW + wide
    blocks = {
        "conv": Layer(3, three, 2),
        "conv_1": Layer(NARROW, three, padded=False),
        "conv_2": Layer(NARROW, three),
        "pool0": nn.MaxPool2d(3, 2),
        "conv_3": Layer(NARROW, one),
        "conv_4": Layer(NARROW, three, padded=False),
        "pool1": nn.MaxPool2d(3, 2),
        **{
            f"mixed{suffix}": mixed(NARROW if not suffix else wide, [one, five], [one, three, three])
            for suffix in ("", "_1", "_2")
        },
        "mixed_3": named(
            Block(),
            conv=Layer(wide, three, 2),
            tower=tower(wide, one, three, three, stride=2),
            pool=nn.MaxPool2d(3, 2),
        ),
        **{
            f"mixed_{n}": mixed(after_3 if n == 4 else wide, [one, flat, high], [one, high, flat, high, flat])
            for n in range(4, 8)
        },
        "mixed_8": named(
            Block(),
            tower=tower(wide, one, three, stride=2),
            tower_1=tower(wide, one, flat, high, three, stride=2),
            pool=nn.MaxPool2d(3, 2),
        ),
        "mixed_9": LastBlock(after_8, average(), (NARROW, NARROW, NARROW)),
        "mixed_10": LastBlock(6 * NARROW, nn.MaxPool2d(3, 1, 1), (320, 384, 192)),
        "pool2": nn.AvgPool2d(8),
        "flat": nn.Flatten(),
    }
    net = named(nn.Module(), layers=named(nn.Sequential(), **blocks))
    net.forward = net.layers.forward  # type: ignore[method-assign]
    return named(nn.Sequential(), net=net)
