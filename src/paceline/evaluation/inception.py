"""The 2015 Inception network, on which FID is based, as a plain module with weights from a TorchScript file."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.core.gpu import float32_products

SIDE_PX = 299  # of the network's input
PREFIX = "net.layers."
EPSILON = 0.001  # added to the variances in BatchNorm


class ConvReLU(nn.Module):
    """A convolution followed by ReLU, as one kernel if cuDNN uses tensor cores."""

    weight: Tensor
    bias: Tensor

    def __init__(self, weight: Tensor, bias: Tensor, stride: int, padding: tuple[int, int]) -> None:
        super().__init__()
        self.register_buffer("weight", weight)
        self.register_buffer("bias", bias)
        self.stride, self.padding = (stride, stride), padding
        self.aligned = weight.shape[1] % 8 == 0  # false only for the first layer, which has 3 input channels

    def forward(self, x: Tensor) -> Tensor:
        if self.aligned and _may_fuse(x):
            return torch.cudnn_convolution_relu(x, self.weight, self.bias, self.stride, self.padding, (1, 1), 1)
        return F.conv2d(x, self.weight, self.bias, self.stride, self.padding).relu_()


class AveragedConvReLU(ConvReLU):
    """A 1×1 convolution, a 3×3 average that ignores padding, then ReLU.

    In the original network, the average comes first. Both operations are linear and the weights of an average sum to
    one, so their order can be swapped. The average is then computed over far fewer channels.
    """

    def forward(self, x: Tensor) -> Tensor:
        x = F.conv2d(x, self.weight, self.bias)
        return F.avg_pool2d(x, 3, stride=1, padding=1, count_include_pad=False).relu_()


class Branches(nn.Module):
    """The outputs of several modules for the same input, concatenated as channels."""

    def __init__(self, *branches: nn.Module) -> None:
        super().__init__()
        self.branches = nn.ModuleList(branches)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([branch(x) for branch in self.branches], dim=1)


class Mean(nn.Module):
    """The mean of each channel, in float32 or higher precision."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mean(dim=(2, 3), dtype=torch.promote_types(x.dtype, torch.float32))


def inception_network(weights: Mapping[str, Tensor]) -> nn.Sequential:
    """Return the network (299-pixel images in [-1, 1] to 2048 features); raise KeyError if a weight is missing."""

    def conv(name: str, stride: int = 1, *, padded: bool = True, kind: type[ConvReLU] = ConvReLU) -> ConvReLU:
        weight, bias = _fold(weights, PREFIX + name)
        height, width = weight.shape[2:]
        inside = padded and stride == 1
        return kind(weight, bias, stride, (height // 2, width // 2) if inside else (0, 0))

    def tower(name: str, count: int, stride: int = 1) -> nn.Sequential:
        """Return a sequence of convolutions; the stride applies to the last one."""
        names = [f"{name}.conv"] + [f"{name}.conv_{number}" for number in range(1, count)]
        return nn.Sequential(*map(conv, names[:-1]), conv(names[-1], stride))

    def fork(name: str) -> Branches:
        return Branches(conv(f"{name}_mixed_conv"), conv(f"{name}_mixed_conv_1"))

    def mixed(name: str, *lengths: int) -> Branches:
        """Return an Inception block: a convolution, stacks of convolutions, and average pooling in parallel."""
        towers = [tower(f"{name}.tower{_suffix(number)}", length) for number, length in enumerate(lengths)]
        average = conv(f"{name}.tower_{len(lengths)}.conv", kind=AveragedConvReLU)
        return Branches(conv(f"{name}.conv"), *towers, average)

    def forked(name: str, last: nn.Module) -> Branches:
        return Branches(
            conv(f"{name}.conv"),
            nn.Sequential(conv(f"{name}.tower_conv"), fork(f"{name}.tower")),
            nn.Sequential(conv(f"{name}.tower_1_conv"), conv(f"{name}.tower_1_conv_1"), fork(f"{name}.tower_1")),
            last,
        )

    halving = nn.MaxPool2d(3, stride=2)
    return nn.Sequential(
        conv("conv", stride=2),
        conv("conv_1", padded=False),
        conv("conv_2"),
        halving,
        conv("conv_3"),
        conv("conv_4", padded=False),
        halving,
        *(mixed(f"mixed{_suffix(number)}", 2, 3) for number in range(3)),
        Branches(conv("mixed_3.conv", stride=2), tower("mixed_3.tower", 3, stride=2), halving),
        *(mixed(f"mixed_{number}", 3, 5) for number in range(4, 8)),
        Branches(tower("mixed_8.tower", 2, stride=2), tower("mixed_8.tower_1", 4, stride=2), halving),
        forked("mixed_9", conv("mixed_9.tower_2_conv", kind=AveragedConvReLU)),
        forked("mixed_10", nn.Sequential(nn.MaxPool2d(3, stride=1, padding=1), conv("mixed_10.tower_2_conv"))),
        Mean(),
    ).eval()


def _may_fuse(x: Tensor) -> bool:
    """Return whether to use cuDNN's fused convolution and ReLU: it is faster on tensor cores but not deterministic."""
    on_tensor_cores = x.is_cuda and torch.version.hip is None and x.is_contiguous(memory_format=torch.channels_last)
    return on_tensor_cores and not torch.are_deterministic_algorithms_enabled()


def _suffix(number: int) -> str:
    return f"_{number}" if number else ""


def _fold(weights: Mapping[str, Tensor], name: str) -> tuple[Tensor, Tensor]:
    """Return the weight and bias of a convolution, with the BatchNorm that follows it (without scale) folded in."""
    weight, beta, mean, var = (weights[f"{name}.{part}"].double() for part in ("weight", "beta", "mean", "var"))
    scale = (var + EPSILON).rsqrt()
    dtype = weights[f"{name}.weight"].dtype
    return (weight * scale[:, None, None, None]).to(dtype), (beta - mean * scale).to(dtype)


def load_script(path: str, device: torch.device) -> nn.Module:
    """Return the network in a TorchScript file."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # hide the warning that TorchScript is deprecated
        script: nn.Module = torch.jit.load(path, map_location=device)  # type: ignore[no-untyped-call,unused-ignore]
        return script.eval()


def make_test_image(device: torch.device) -> Tensor:
    """Return an image that distinguishes networks: each channel is a gradient in a different direction."""
    row, column = torch.meshgrid(torch.arange(SIDE_PX), torch.arange(SIDE_PX), indexing="ij")
    image = torch.stack([row % 256, column % 256, (3 * row + 2 * column) % 256])
    return image[None].to(device, torch.uint8)


def enlarged(images: Tensor) -> Tensor:
    """Convert uint8 images to the network's input: 299 pixels, three channels, values in [-1, 1]."""
    return resize_like_tensorflow(images.float() / 128 - 1, SIDE_PX).expand(-1, 3, -1, -1)


def resize_like_tensorflow(images: Tensor, side_px: int) -> Tensor:
    """Resize bilinearly, sampling pixel i of the result at i · old size / new size, as TensorFlow 1 and FID do."""
    rows, columns = (_shares(old, side_px, images.device) for old in images.shape[-2:])
    with float32_products(tf32=False):  # TF32 would round the weights
        return rows @ images @ columns.T


@lru_cache(maxsize=4)
def _shares(old: int, new: int, device: torch.device) -> Tensor:
    """Return the interpolation weights along one side as a [new, old] matrix."""
    place = torch.arange(new, device=device) * (old / new)
    low = place.floor().long().clamp_max(old - 1)
    itself = torch.eye(old, device=device)
    return itself[low].lerp(itself[(low + 1).clamp_max(old - 1)], (place - low)[:, None])
