"""Adapts networks from other libraries: the range of their values, fused norms, and parameters without effect."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import chain

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.models.layers import in_full_precision

MASK = "attn_mask"  # prefix of the buffers in which windowed attention stores a mask for the training size
INFERENCE_ONLY = "eval_conv"  # a convolution that its module computes from other convolutions in eval mode


@dataclass(frozen=True)
class SizeRule:
    """The image sizes that a network accepts. Other images are padded at the right and at the bottom."""

    scale: int = 1  # height and width of the output relative to the input
    minimum_px: int = 0
    multiple_px: int = 1
    square: bool = False

    def padding(self, height: int, width: int) -> tuple[int, int]:
        """Return the rows and columns to add."""
        sides = [-(-max(side, self.minimum_px) // self.multiple_px) * self.multiple_px for side in (height, width)]
        if self.square:
            sides = [max(sides)] * 2
        return sides[0] - height, sides[1] - width


class UnitRangeNetwork(nn.Module):
    """Applies a network for images in [0, 1] to images in [-1, 1] of any size.

    The wrapped network is changed so that its state_dict contains trained values only: masks that depend on the image
    size and weights that serve inference only are left out.
    """

    def __init__(self, network: nn.Module, call: Callable[[nn.Module, Tensor], Tensor], size: SizeRule) -> None:
        super().__init__()
        self.network, self.size = network, size
        self._call = call  # runs the network and returns its image; some networks return more than that
        self._merged = _without_inference_only(network)
        _forget_masks(network)
        self._constants = _register_constants(network)

    def train(self, mode: bool = True) -> UnitRangeNetwork:
        """Select training or eval mode. Convolutions that would be merged for inference always run unmerged."""
        super().train(mode)
        for name in self._merged:
            self.network.get_submodule(name).train()
        return self

    def forward(self, images: Tensor) -> Tensor:
        height, width = images.shape[-2:]
        scale = self.size.scale
        padded = _pad(images * 0.5 + 0.5, *self.size.padding(height, width))
        owners = [(self.network.get_submodule(path), name) for path, name in self._constants]
        constants = [getattr(owner, name) for owner, name in owners]
        # Networks create masks on the default device. A copy from the host could not be captured in a CUDA graph.
        with images.device if images.is_cuda else nullcontext():
            result = self._call(self.network, padded)
        # A network may replace a constant with a copy on the device of its input, which may be a tensor without data.
        for (owner, name), constant in zip(owners, constants, strict=True):
            setattr(owner, name, constant)
        return in_full_precision(result)[..., : height * scale, : width * scale] * 2 - 1

    def freeze_unused(self, used: set[str]) -> list[str]:
        """Exclude the parameters that do not affect the output from training; return their names."""
        unused = [name for name, _ in self.named_parameters() if name not in used]
        for name in unused:
            self.get_parameter(name).requires_grad_(False)
        return unused


def _pad(images: Tensor, rows: int, columns: int) -> Tensor:
    """Add reflected pixels at the bottom and at the right; if the image is too small for that, also repeat its edge."""
    if not rows and not columns:
        return images
    reflected_rows, reflected_columns = min(rows, images.shape[-2] - 1), min(columns, images.shape[-1] - 1)
    images = F.pad(images, (0, reflected_columns, 0, reflected_rows), "reflect")
    return F.pad(images, (0, columns - reflected_columns, 0, rows - reflected_rows), "replicate")


def _without_inference_only(network: nn.Module) -> list[str]:
    """Remove convolutions that are computed from others in eval mode; return the names of their modules."""
    found = []
    for name, module in network.named_modules():
        if isinstance(getattr(module, INFERENCE_ONLY, None), nn.Module) and hasattr(module, "update_params"):
            delattr(module, INFERENCE_ONLY)
            found.append(name)
    return found


def _forget_masks(network: nn.Module) -> None:
    """Leave masks out of the state_dict: they depend on the training size, and the network can compute them."""
    for module in network.modules():
        for name, mask in list(module.named_buffers(recurse=False)):
            if name.startswith(MASK):
                delattr(module, name)
                module.register_buffer(name, mask, persistent=False)


def _register_constants(network: nn.Module) -> list[tuple[str, str]]:
    """Make plain tensor attributes buffers, so that they move with the network; return their owners and names."""
    found = []
    for path, module in network.named_modules():
        for name, value in list(vars(module).items()):
            if isinstance(value, Tensor):
                delattr(module, name)
                module.register_buffer(name, value, persistent=False)
                found.append((path, name))
    return found


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


def used_parameters(network: nn.Module, size: tuple[int, int, int, int]) -> set[str]:
    """Return the names of the parameters that the output for images of this size depends on."""
    result, copies = run_copy(network, size, train=True)
    reached = _leaves(result)
    return {name for name, tensor in copies.items() if id(tensor) in reached}


def run_copy(network: nn.Module, size: tuple[int, int, int, int], *, train: bool) -> tuple[Tensor, dict[str, Tensor]]:
    """Return a network's output for images of this size, and the copies of its tensors that it was computed with."""
    try:
        return _run_copy(network, size, torch.device("meta"), train)  # computes shapes only, which takes little time
    except Exception:  # a network may not support tensors without data
        with torch.random.fork_rng(devices=[]):
            return _run_copy(network, size, torch.device("cpu"), train)


def _run_copy(
    network: nn.Module, size: tuple[int, int, int, int], device: torch.device, train: bool
) -> tuple[Tensor, dict[str, Tensor]]:
    # Copies, because normalisation layers update their statistics.
    named = chain(network.named_parameters(), network.named_buffers())
    copies = {
        name: tensor.detach().to(device, copy=True).requires_grad_(isinstance(tensor, nn.Parameter))
        for name, tensor in named
    }
    was_training, dtype = network.training, next(network.parameters()).dtype
    network.train(train)
    try:
        with torch.set_grad_enabled(train), device:
            result = torch.func.functional_call(network, copies, (torch.zeros(size, device=device, dtype=dtype),))
    finally:
        network.train(was_training)
    return result, copies


def _leaves(result: Tensor) -> set[int]:
    """Return the id() of each leaf tensor in the graph of a result."""
    leaves, seen, waiting = set[int](), set[object](), [result.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            leaves.add(id(node.variable))
        waiting += [before for before, _ in node.next_functions]
    return leaves
