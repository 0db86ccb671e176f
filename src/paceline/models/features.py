"""Features of a frozen VGG19 and LPIPS, for perceptual losses and distances."""

from __future__ import annotations

import copy
import importlib.util
import re
import warnings
from functools import cache
from pathlib import Path
from threading import Lock
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.core.errors import UserError, install_extra, unknown
from paceline.models.torch_file import read_state_dict

CONVOLUTIONS_PER_STAGE = (2, 2, 4, 4, 4)  # every stage except the first starts with max pooling
LAYERS = tuple(
    f"{kind}{stage}_{number}"
    for stage, count in enumerate(CONVOLUTIONS_PER_STAGE, start=1)
    for number in range(1, count + 1)
    for kind in ("conv", "relu")
)
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
RANDOM = "random"
CPU = torch.device("cpu")
_POOLED = {sum(CONVOLUTIONS_PER_STAGE[:stage]) for stage in range(1, len(CONVOLUTIONS_PER_STAGE))}
_RANDOM_WIDTHS = (8, 8, 16, 16, *[32] * 4, *[64] * 8)

Layers = list[tuple[Tensor, Tensor]]  # weight and bias of each layer, in order
_lock = Lock()  # needed because DataParallel uses several threads


class Features:
    """Computes the outputs of VGG19 layers for images in [-1, 1]; not an nn.Module, so no module tree includes it."""

    def __init__(self, weights: str = "", layer: str = "conv5_4", *others: str) -> None:
        """`weights` is a file, "random" for an untrained, narrow network, or "" for torchvision's weights."""
        self.layers = (layer, *others)
        for name in self.layers:
            if name not in LAYERS:
                raise unknown("layer of VGG19", name, LAYERS)
        self.weights, self.layer = weights, max(self.layers, key=LAYERS.index)
        self.num_convolutions = LAYERS.index(self.layer) // 2 + 1
        self.smallest_px = 2 ** sum(number < self.num_convolutions for number in _POOLED)

    def __call__(self, images: Tensor) -> Tensor:
        """Return the output of the first layer that was passed to the constructor."""
        return self.all(images)[0]

    def all(self, images: Tensor) -> list[Tensor]:
        """Return the outputs of all layers, in the order in which they were passed to the constructor."""
        device, dtype, (height, width) = images.device, images.dtype, images.shape[-2:]
        if min(height, width) < self.smallest_px:
            raise UserError(
                f"vgg_layer={self.layer}: needs images of at least {self.smallest_px}×{self.smallest_px} pixels, "
                f"not {width}×{height}; use a larger --crop or an earlier layer"
            )
        if torch.is_autocast_enabled(device.type):
            dtype = torch.get_autocast_dtype(device.type)
        layers = self.load(device, dtype)
        # Disable autocast, which would convert the frozen weights on every call.
        with torch.autocast(device.type, enabled=False):
            found = self._run(layers, images)
        return [found[name] for name in self.layers]

    def _run(self, layers: Layers, images: Tensor) -> dict[str, Tensor]:
        (colours, shift), *convolutions = layers
        seen = F.conv2d(images.to(colours.dtype).expand(-1, 3, -1, -1), colours, shift)
        features = seen.to(convolutions[0][0].dtype)
        found: dict[str, Tensor] = {}
        for number, (weight, bias) in enumerate(convolutions):
            if number in _POOLED:
                features = F.max_pool2d(features, 2)
            features = F.conv2d(features, weight, bias, padding=1)
            before, after = LAYERS[2 * number : 2 * number + 2]
            found |= {before: features} if before in self.layers else {}
            if number + 1 < len(convolutions) or after in self.layers:
                features = F.relu(features)
                found |= {after: features} if after in self.layers else {}
        return found

    def load(self, device: torch.device = CPU, dtype: torch.dtype = torch.float32) -> Layers:
        """Return the colour layer, in float32 or wider, and the required convolutions; all uses share a copy."""
        with _lock:
            colours, *convolutions = _layers_on(self.weights, self.num_convolutions, device, dtype)
        if len(convolutions) < self.num_convolutions:
            raise UserError(
                f"--vgg {self.weights}: has only {len(convolutions)} convolutions, but {self.layer} needs "
                f"{self.num_convolutions}; choose an earlier layer or a different file"
            )
        return [colours, *convolutions]


@cache
def _layers_on(weights: str, num_convolutions: int, device: torch.device, dtype: torch.dtype) -> Layers:
    colours, *convolutions = _load(weights)
    wide = torch.promote_types(dtype, torch.float32)
    return [_moved(colours, device, wide), *(_moved(layer, device, dtype) for layer in convolutions[:num_convolutions])]


def _moved(layer: tuple[Tensor, Tensor], device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    weight, bias = (tensor.to(device, dtype) for tensor in layer)
    if device.type == "cuda":
        weight = weight.contiguous(memory_format=torch.channels_last)
    return weight, bias


@cache
def _load(weights: str) -> Layers:
    """Return all layers in float32 on the CPU: a layer that converts colours from [-1, 1], then the convolutions."""
    if weights == RANDOM:
        return [_imagenet_colours(), *_random_layers()]
    if weights and not Path(weights).is_file():
        raise UserError(f"--vgg {weights}: no such file; pass a file with VGG19's weights, or set perceptual=0")
    tensors = read_state_dict(Path(weights), f"--vgg {weights}") if weights else _torchvision_tensors()
    named = sorted(
        ([int(number) for number in re.findall(r"\d+", name)], name.removesuffix(".weight"))
        for name, tensor in tensors.items()
        if tensor.dim() == 4
    )
    layers = [(tensors[f"{name}.weight"].float(), tensors.get(f"{name}.bias")) for _, name in named]
    found: Layers = [(weight, torch.zeros(len(weight)) if bias is None else bias.float()) for weight, bias in layers]
    if found and found[0][0].shape == (3, 3, 1, 1):  # this is the rescaled network, which expects RGB in 0…1
        weight, bias = found.pop(0)
        colours = (weight * 0.5, bias + 0.5 * weight.sum((1, 2, 3)))
    else:
        colours = _imagenet_colours()
    fits = found and all(
        weight.shape[1:] == (channels, 3, 3)
        for (weight, _), channels in zip(found, [3, *(len(weight) for weight, _ in found)], strict=False)
    )
    if not fits:
        raise UserError(f"--vgg {weights}: does not contain VGG19's convolution weights; use a different file")
    return [colours, *found]


def _imagenet_colours() -> tuple[Tensor, Tensor]:
    mean, std = torch.tensor(IMAGENET_MEAN), torch.tensor(IMAGENET_STD)
    return torch.diag(0.5 / std)[:, :, None, None], (0.5 - mean) / std


def _random_layers() -> Layers:
    """Return narrow, untrained layers that preserve the variance of activations; every process gets the same ones."""
    generator = torch.Generator().manual_seed(19)
    layers, channels = [], 3
    for width in _RANDOM_WIDTHS:
        weight = torch.randn(width, channels, 3, 3, generator=generator) * (2 / (9 * channels)) ** 0.5
        layers.append((weight, torch.zeros(width)))
        channels = width
    return layers


def _torchvision_tensors() -> dict[str, Tensor]:
    from torchvision.models import VGG19_Weights  # imported here because the import takes about a second

    try:
        tensors: dict[str, Tensor] = VGG19_Weights.IMAGENET1K_V1.get_state_dict(progress=False, check_hash=True)
        return tensors
    except (OSError, RuntimeError) as error:
        raise UserError(
            f"VGG19's weights cannot be downloaded ({error}); pass a file with --vgg FILE, or set perceptual=0"
        ) from None


def has_lpips() -> bool:
    """Return whether the package `lpips` is installed."""
    return importlib.util.find_spec("lpips") is not None


@cache
def load_lpips() -> nn.Module:
    """Return the frozen LPIPS network on the CPU; raises whatever the package raises if its weights are missing."""
    import lpips

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the package calls torchvision with arguments that are deprecated
        network: nn.Module = lpips.LPIPS(net="alex", verbose=False)
    return network.eval().requires_grad_(False)


def check_lpips() -> None:
    """Raise UserError if LPIPS cannot be used as a loss."""
    if not has_lpips():
        raise UserError(f"lpips: the package is not installed; install with: {install_extra('lpips')}, or set lpips=0")
    try:
        load_lpips()
    except Exception as error:
        raise UserError(f"lpips: the network cannot be loaded ({str(error).splitlines()[0]}); set lpips=0") from None


def lpips_loss(made: Tensor, target: Tensor) -> Tensor:
    """Return the mean LPIPS distance between images in [-1, 1], in float32 or wider."""
    dtype = torch.promote_types(made.dtype, torch.float32)
    with _lock:
        network = _lpips_on(made.device, dtype)
    with torch.autocast(made.device.type, enabled=False):
        one, other = (images.to(dtype).expand(-1, 3, -1, -1) for images in (made, target))
        return cast(Tensor, network(one, other)).mean()


@cache
def _lpips_on(device: torch.device, dtype: torch.dtype) -> nn.Module:
    return copy.deepcopy(load_lpips()).to(device, dtype)
