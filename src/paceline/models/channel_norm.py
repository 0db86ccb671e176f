"""LayerNorm over the channels of images, as in NAFNet, with torch's fused kernel."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

# The class name that restoration networks use for this layer. Their own versions compute it, and its gradient, in a
# dozen elementwise operations of a custom autograd function, which torch.compile cannot fuse.
REPLACED_CLASS = "LayerNorm2d"


class ChannelNorm(nn.Module):
    """Normalises each pixel of images [n, c, h, w] across its channels."""

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter, eps: float) -> None:
        super().__init__()
        self.weight, self.bias, self.eps = weight, bias, eps

    def forward(self, images: Tensor) -> Tensor:
        pixels = images.permute(0, 2, 3, 1)  # already contiguous in memory format channels_last
        return F.layer_norm(pixels, self.weight.shape, self.weight, self.bias, self.eps).permute(0, 3, 1, 2)


def fuse_channel_norms(network: nn.Module) -> nn.Module:
    """Replace a network's LayerNorm2d modules with ChannelNorm, with the same parameters; return the network."""
    for name, module in list(network.named_modules()):
        if type(module).__name__ == REPLACED_CLASS and not isinstance(module, nn.LayerNorm):
            fused = ChannelNorm(module.get_parameter("weight"), module.get_parameter("bias"), float(module.eps))
            network.set_submodule(name, fused)
    return network
