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
from paceline.models.networks import check_architecture, first_keys
from paceline.models.torch_file import read_state_dict

Layer = dict[str, Tensor]  # a layer's tensors: weight, bias, running_mean, …
SCALES = {1: "2", 2: "4", 3: "8"}  # the scale for each number of doubling blocks
SUPPORTED = "--recipe super_resolution imports only SRGAN generators; leave --recipe out for networks from spandrel"
NOT_SRGAN = "not an SRGAN generator"
CROP_PX = 96  # image size in the data spec; the network accepts images of any size


class SrganFile(Importer):
    """An SRGAN generator. Its settings are inferred from its tensors."""

    tries_any_file = True

    def __init__(self, paths: Sequence[Path]) -> None:
        path = only_path(paths, "an SRGAN generator")
        state = read_state_dict(path)
        check_architecture(state, path, SUPPORTED)
        kinds = _by_kind(state, path)
        convolutions, norms, slopes = kinds["convolution"], kinds["norm"], kinds["slope"]
        shapes = {key: tuple(layer["weight"].shape) for key, layer in convolutions.items()}
        num_blocks, num_doublings = _count_blocks(shapes, path)
        _check_counts(norms, slopes, num_blocks, num_doublings, path)
        prelu = _widen_slopes(slopes, len(next(iter(convolutions.values()))["weight"]), path)
        tensors = _placed(list(convolutions.values()), list(norms.values()), list(slopes.values()), num_blocks)
        shared = num_blocks > 1 and _repeats(tensors, "blocks") and _repeats(tensors, "doublings")
        if shared:
            copies = tuple(f"{part}.{n}." for part in ("blocks", "doublings") for n in range(1, max(num_blocks, 4)))
            tensors = {key: tensor for key, tensor in tensors.items() if not key.startswith(copies)}
        width, self.channels = next(iter(shapes.values()))[:2]
        self.generator = {f"generator.{key}": tensor for key, tensor in tensors.items()}
        self.assumed = {"output": "tanh"} | ({"batchnorm": "running"} if norms else {})
        self.recognised = {
            "scale": SCALES[num_doublings],
            "num_blocks": num_blocks,
            "width": width,
            "norm": "batch" if norms else "none",
            "blocks": "shared" if shared else "separate",
            "prelu": prelu,
        }

    def data_spec(self, settings: Mapping[str, SettingValue]) -> DataSpec:
        return DataSpec(self.channels, CROP_PX, CROP_PX)

    def tensors(self, own: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return self.generator


def _count_blocks(shapes: Mapping[str, tuple[int, ...]], path: Path) -> tuple[int, int]:
    """Return the numbers of residual and doubling blocks; raise UserError for the first layer that does not fit."""
    if len(shapes) < 5:
        raise UserError(
            f"{path}: an SRGAN generator has at least five convolutions, but this file has {len(shapes)} "
            f"{first_keys(shapes)}"
        )
    width, channels = next(iter(shapes.values()))[:2]
    num_doublings = sum(shape == (4 * width, width, 3, 3) for shape in shapes.values())
    num_blocks, rest = divmod(len(shapes) - 3 - num_doublings, 2)
    inside = [(width, width, 3, 3)] * (2 * num_blocks + 1) + [(4 * width, width, 3, 3)] * num_doublings
    expected_shapes = [(width, channels, 9, 9), *inside, (channels, width, 9, 9)]
    for number, (key, shape) in enumerate(shapes.items()):
        if number >= len(expected_shapes) or shape != expected_shapes[number]:
            expected = (
                f"expected {expected_shapes[number]}" if number < len(expected_shapes) else "expected no further layers"
            )
            raise UserError(f"{path}: {key}.weight has shape {shape}, {expected}: {NOT_SRGAN}")
    if rest or num_doublings not in SCALES:
        raise UserError(f"{path}: upscales by a factor of {2**num_doublings}; supported factors are 2, 4 and 8")
    return num_blocks, num_doublings


def _check_counts(
    norms: Mapping[str, Layer], slopes: Mapping[str, Layer], num_blocks: int, num_doublings: int, path: Path
) -> None:
    """Raise UserError if the normalisation layers or PReLUs do not match the convolutions."""
    if norms and len(norms) != 2 * num_blocks + 1:
        raise UserError(
            f"{path}: has {len(norms)} normalisation layers, expected {2 * num_blocks + 1} or none: {NOT_SRGAN}"
        )
    if len(slopes) != 1 + num_blocks + num_doublings:
        raise UserError(f"{path}: has {len(slopes)} PReLUs, expected {1 + num_blocks + num_doublings}: {NOT_SRGAN}")


def _widen_slopes(slopes: Mapping[str, Layer], width: int, path: Path) -> str:
    """Return the setting `prelu`; if any PReLU has one slope per channel, expand the others in place."""
    for key, layer in slopes.items():
        if len(layer["weight"]) not in (1, width):
            raise UserError(f"{path}: {key}.weight has {len(layer['weight'])} slopes, expected 1 or {width}")
    if all(len(layer["weight"]) == 1 for layer in slopes.values()):
        return "shared"
    for layer in slopes.values():
        layer["weight"] = layer["weight"].expand(width)
    return "channel"


def _by_kind(state: Mapping[str, Tensor], path: Path) -> dict[str, dict[str, Layer]]:
    """Return the layers as a nested dict, kind → name → layer, in file order."""
    layers: dict[str, Layer] = {}
    for key, tensor in state.items():
        owner, _, part = key.rpartition(".")
        layers.setdefault(owner, {})[part] = tensor
    kinds: dict[str, dict[str, Layer]] = {"convolution": {}, "norm": {}, "slope": {}}
    for key, layer in layers.items():
        weight = layer.get("weight")
        if "running_mean" in layer and weight is not None:
            kinds["norm"][key] = layer
        elif weight is not None and weight.dim() == 4:
            kinds["convolution"][key] = layer
        elif weight is not None and weight.dim() == 1 and "bias" not in layer:
            kinds["slope"][key] = layer
        else:
            name = f"{key}.{next(iter(layer))}".removeprefix(".")
            raise UserError(f"{path}: {name} does not belong to an SRGAN generator {first_keys(state)}")
    return kinds


def _placed(
    convolutions: Sequence[Layer], norms: Sequence[Layer], slopes: Sequence[Layer], num_blocks: int
) -> dict[str, Tensor]:
    """Return the tensors under Paceline's names, with separate tensors for each block."""
    after = 2 * num_blocks + 1  # index of the body's last convolution
    places = ["head.0", *(f"blocks.{n // 2}.conv{n % 2 + 1}" for n in range(2 * num_blocks)), "body.0"]
    places += [*(f"doublings.{n}.conv" for n in range(len(convolutions) - after - 2)), "tail"]
    tensors: dict[str, Tensor] = {}
    for place, layer in zip(places, convolutions, strict=True):
        weight = layer["weight"]
        tensors |= {f"{place}.weight": weight, f"{place}.bias": layer.get("bias", torch.zeros(len(weight)))}
    places = [*(f"blocks.{n // 2}.norm{n % 2 + 1}" for n in range(2 * num_blocks)), "body.1"]
    for place, layer in zip(places, norms, strict=False):
        layer = {"num_batches_tracked": torch.tensor(0), **layer}
        tensors |= {f"{place}.{part}": tensor for part, tensor in layer.items()}
    places = ["head.1", *(f"blocks.{n}.act" for n in range(num_blocks))]
    places += [f"doublings.{n}.act" for n in range(len(slopes) - len(places))]
    return tensors | {f"{place}.weight": layer["weight"] for place, layer in zip(places, slopes, strict=True)}


def _repeats(tensors: Mapping[str, Tensor], part: str) -> bool:
    """Return whether all blocks of one kind (residual or upsampling) have the same tensors as the first block."""
    for key, tensor in tensors.items():
        first, number, rest = (*key.split(".", 2), "", "")[:3]
        if first == part and number != "0" and not torch.equal(tensor, tensors[f"{part}.0.{rest}"]):
            return False
    return True
