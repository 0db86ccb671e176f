"""Residual networks for classification, with torchvision's module names, so that torchvision's weights can be loaded.

He et al., Deep Residual Learning for Image Recognition (2015). The stem `small` starts with a 3×3
convolution instead of a 7×7 one, for images of about 32×32 pixels.
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor, nn

from paceline.models.layers import normalisation

Norm = Literal["batch", "none"]


class BasicBlock(nn.Module):
    """Two 3×3 convolutions with a shortcut around them."""

    expansion = 1

    def __init__(self, in_channels: int, width: int, stride: int, norm: Norm) -> None:
        super().__init__()
        self.conv1 = _convolution(in_channels, width, 3, norm, stride)
        self.bn1 = normalisation(width, norm)
        self.conv2 = _convolution(width, width, 3, norm)
        self.bn2 = normalisation(width, norm)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = _shortcut(in_channels, width, stride, norm)

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x if self.downsample is None else self.downsample(x)
        x = self.relu(self.bn1(self.conv1(x)))
        x = self.bn2(self.conv2(x))
        out: Tensor = self.relu(x + shortcut)
        return out

    def last_layers(self) -> tuple[nn.Conv2d, nn.Module]:
        """Return the last convolution and normalisation in the residual branch."""
        return self.conv2, self.bn2


class Bottleneck(nn.Module):
    """1×1, 3×3 and 1×1 convolutions, narrow in the middle, with a shortcut around them."""

    expansion = 4

    def __init__(self, in_channels: int, width: int, stride: int, norm: Norm) -> None:
        super().__init__()
        out_channels = width * self.expansion
        self.conv1 = _convolution(in_channels, width, 1, norm)
        self.bn1 = normalisation(width, norm)
        self.conv2 = _convolution(width, width, 3, norm, stride)
        self.bn2 = normalisation(width, norm)
        self.conv3 = _convolution(width, out_channels, 1, norm)
        self.bn3 = normalisation(out_channels, norm)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = _shortcut(in_channels, out_channels, stride, norm)

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x if self.downsample is None else self.downsample(x)
        x = self.relu(self.bn1(self.conv1(x)))
        x = self.relu(self.bn2(self.conv2(x)))
        x = self.bn3(self.conv3(x))
        out: Tensor = self.relu(x + shortcut)
        return out

    def last_layers(self) -> tuple[nn.Conv2d, nn.Module]:
        """Return the last convolution and normalisation in the residual branch."""
        return self.conv3, self.bn3


BLOCKS: dict[int, tuple[type[BasicBlock | Bottleneck], tuple[int, ...]]] = {
    18: (BasicBlock, (2, 2, 2, 2)),
    34: (BasicBlock, (3, 4, 6, 3)),
    50: (Bottleneck, (3, 4, 6, 3)),
}


class ResNet(nn.Module):
    """A residual network with 18, 34 or 50 layers and one logit per class."""

    def __init__(
        self,
        depth: int,
        num_classes: int,
        in_channels: int = 3,
        stem: Literal["small", "plain"] = "plain",
        norm: Norm = "batch",
        width: int = 64,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        block, counts = BLOCKS[depth]
        small = stem == "small"
        self.conv1 = _convolution(in_channels, width, 3 if small else 7, norm, stride=1 if small else 2)
        self.bn1 = normalisation(width, norm)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.Identity() if small else nn.MaxPool2d(3, stride=2, padding=1)
        expansion = block.expansion
        self.layer1 = _stage(block, counts[0], width, width, 1, norm)
        self.layer2 = _stage(block, counts[1], width * expansion, 2 * width, 2, norm)
        self.layer3 = _stage(block, counts[2], 2 * width * expansion, 4 * width, 2, norm)
        self.layer4 = _stage(block, counts[3], 4 * width * expansion, 8 * width, 2, norm)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.dropout = nn.Dropout(dropout) if dropout else nn.Identity()
        self.fc = nn.Linear(8 * width * expansion, num_classes)
        self._initialise(norm)

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        logits: Tensor = self.fc(self.dropout(self.avgpool(x).flatten(1)))
        return logits

    def _initialise(self, norm: Norm) -> None:
        # Without normalisation nothing rescales the features: fan_in preserves their variance from layer to layer.
        mode: Literal["fan_in", "fan_out"] = "fan_out" if norm == "batch" else "fan_in"
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode=mode, nonlinearity="relu")
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
        # Every residual branch starts at zero, so that a new network acts like a shallow one. This speeds up training,
        # and networks without normalisation do not train otherwise.
        for module in self.modules():
            if isinstance(module, BasicBlock | Bottleneck):
                convolution, norm_layer = module.last_layers()
                last = norm_layer if isinstance(norm_layer, nn.BatchNorm2d) else convolution
                nn.init.zeros_(last.weight)


def _stage(
    block: type[BasicBlock | Bottleneck], count: int, in_channels: int, width: int, stride: int, norm: Norm
) -> nn.Sequential:
    first = block(in_channels, width, stride, norm)
    return nn.Sequential(first, *(block(width * block.expansion, width, 1, norm) for _ in range(count - 1)))


def _convolution(in_channels: int, out_channels: int, size: int, norm: Norm, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(in_channels, out_channels, size, stride, padding=size // 2, bias=norm == "none")


def _shortcut(in_channels: int, out_channels: int, stride: int, norm: Norm) -> nn.Sequential | None:
    if stride == 1 and in_channels == out_channels:
        return None
    return nn.Sequential(_convolution(in_channels, out_channels, 1, norm, stride), normalisation(out_channels, norm))
