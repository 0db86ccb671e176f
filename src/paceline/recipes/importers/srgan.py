"""Importer for SRGAN generators from other projects: recognises tensors by order and shape, not by name.

An SRGAN generator has a 9×9 convolution, residual blocks of two convolutions, another convolution, pixel-shuffle blocks
that double the resolution, and a final 9×9 convolution, with normalisation layers and PReLUs in between. Convolutions,
normalisation layers and PReLUs are each stored in this order. A block that is used several times is stored several
times, with equal tensors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from paceline.contracts.data_spec import DataSpec
from paceline.contracts.importer import Importer, only_path
from paceline.core.errors import UserError
from paceline.core.types import SettingValue
from paceline.models.layers import Norm
from paceline.models.networks import first_keys
from paceline.models.srresnet import PReluKind, SRResNet
from paceline.models.torch_file import read_state_dict

Layers = dict[str, dict[str, Tensor]]  # for each layer in file order: its tensors, called weight, bias, …
SCALES = {1: "2", 2: "4", 3: "8"}  # the scale for each number of doubling blocks
SUPPORTED = "--recipe super_resolution imports only SRGAN generators; leave --recipe out for networks from spandrel"
CROP_PX = 96  # image size in the data spec; the network accepts images of any size


class SrganFile(Importer):
    """An SRGAN generator. Its settings are inferred from its tensors."""

    tries_any_file = True

    def __init__(self, paths: Sequence[Path]) -> None:
        path = only_path(paths, "an SRGAN generator")
        convolutions, norms, slopes = _layers_by_kind(read_state_dict(path), path)
        if len(convolutions) < 5:
            raise UserError(f"{path}: has fewer than five convolutions {first_keys(convolutions)}; {SUPPORTED}")
        width, self.channels = next(iter(convolutions.values()))["weight"].shape[:2]
        num_doublings = sum(len(layer["weight"]) == 4 * width for layer in convolutions.values())
        num_blocks = (len(convolutions) - 3 - num_doublings) // 2
        if num_doublings not in SCALES:
            reason = f"upscales by a factor of {2**num_doublings}; supported factors are 2, 4 and 8"
            raise UserError(f"{path}: {reason}; {SUPPORTED}")
        blocks, doublings = (range(count) for count in (num_blocks, num_doublings))
        prelu: PReluKind = "channel" if any(len(layer["weight"]) > 1 for layer in slopes.values()) else "shared"
        for layer in slopes.values():
            if prelu == "channel" and len(layer["weight"]) == 1:
                layer["weight"] = layer["weight"].expand(width)
        inside = [f"doublings.{n}.conv" for n in doublings]
        activations = [*(f"blocks.{n}.act" for n in blocks), *(f"doublings.{n}.act" for n in doublings)]
        tensors = {
            **_renamed(convolutions, ["head.0", *_of_blocks("conv", blocks), "body.0", *inside, "tail"], path),
            **_renamed(norms, [*_of_blocks("norm", blocks), "body.1"] if norms else [], path),
            **_renamed(slopes, ["head.1", *activations], path),
        }
        norm: Norm = "batch" if norms else "none"
        with torch.device("meta"):
            network = SRResNet(2**num_doublings, self.channels, width, num_blocks, norm=norm, prelu=prelu)
        for name, expected in network.state_dict().items():
            tensor = tensors.get(name)
            if tensor is None or tensor.shape != expected.shape:
                shape = "is missing" if tensor is None else f"has shape {tuple(tensor.shape)}"
                raise UserError(
                    f"{path}: not an SRGAN generator: in its order, {name} {shape}, expected {tuple(expected.shape)}; "
                    f"{SUPPORTED}"
                )
        shared = num_blocks > 1 and _repeats(tensors, "blocks") and _repeats(tensors, "doublings")
        if shared:
            copies = tuple(f"{part}.{n}." for part in ("blocks", "doublings") for n in range(1, max(num_blocks, 4)))
            tensors = {name: tensor for name, tensor in tensors.items() if not name.startswith(copies)}
        self.generator = {f"generator.{name}": tensor for name, tensor in tensors.items()}
        self.assumed = {"output": "tanh"} | ({"batchnorm": "running"} if norms else {})
        self.recognised = {
            "scale": SCALES[num_doublings],
            "num_blocks": num_blocks,
            "width": width,
            "norm": norm,
            "blocks": "shared" if shared else "separate",
            "prelu": prelu,
        }

    def data_spec(self, settings: Mapping[str, SettingValue]) -> DataSpec:
        return DataSpec(self.channels, CROP_PX, CROP_PX)

    def tensors(self, own: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return self.generator


def _of_blocks(kind: str, blocks: range) -> list[str]:
    """Return the names of the two layers of a kind in each residual block."""
    return [f"blocks.{n}.{kind}{number}" for n in blocks for number in (1, 2)]


def _layers_by_kind(state: Mapping[str, Tensor], path: Path) -> tuple[Layers, Layers, Layers]:
    """Return the convolutions, the normalisation layers and the PReLUs, each in file order."""
    layers: Layers = {}
    for key, tensor in state.items():
        owner, _, part = key.rpartition(".")
        layers.setdefault(owner, {})[part] = tensor
    convolutions, norms, slopes = Layers(), Layers(), Layers()
    for key, layer in layers.items():
        weight = layer.get("weight")
        if weight is not None and "running_mean" in layer:
            norms[key] = {"num_batches_tracked": torch.tensor(0), **layer}
        elif weight is not None and weight.dim() == 4:
            convolutions[key] = {"bias": torch.zeros(len(weight)), **layer}
        elif weight is not None and weight.dim() == 1 and "bias" not in layer:
            slopes[key] = layer
        else:
            name = f"{key}.{next(iter(layer))}".removeprefix(".")
            raise UserError(f"{path}: {name} does not belong to an SRGAN generator {first_keys(state)}; {SUPPORTED}")
    return convolutions, norms, slopes


def _renamed(layers: Layers, names: Sequence[str], path: Path) -> dict[str, Tensor]:
    """Return the tensors of layers under Paceline's names, which are in the same order."""
    if len(layers) != len(names):
        raise UserError(
            f"{path}: not an SRGAN generator: has {len(layers)} layers like {next(iter(layers), 'none')}, but expected "
            f"{len(names)}; {SUPPORTED}"
        )
    named = zip(names, layers.values(), strict=True)
    return {f"{name}.{part}": tensor for name, layer in named for part, tensor in layer.items()}


def _repeats(tensors: Mapping[str, Tensor], part: str) -> bool:
    """Return whether all blocks of one kind (residual or upsampling) have the same tensors as the first block."""
    for key, tensor in tensors.items():
        first, number, rest = (*key.split(".", 2), "", "")[:3]
        if first == part and number != "0" and not torch.equal(tensor, tensors[f"{part}.0.{rest}"]):
            return False
    return True
