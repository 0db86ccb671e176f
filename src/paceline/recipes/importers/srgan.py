"""Where the tensors of an SRGAN generator from elsewhere belong in ours: by order and shape, whatever their names.

Such a generator is a 9×9 convolution, residual blocks of two convolutions, one more convolution, doublings by pixel
shuffle and a last 9×9 convolution, each with its normalisation and its PReLU. The convolutions, the normalisations and
the PReLUs each come in that order. A block that is used again and again is listed as often, with equal tensors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.core.errors import UserError

Layer = dict[str, Tensor]  # weight, bias, running_mean, …
SCALES = {1: "2", 2: "4", 3: "8"}  # by the number of doublings


@dataclass(frozen=True)
class Generator:
    """A generator in a file: the settings that make such a network here, and its tensors by our names."""

    settings: dict[str, str | int]
    channels: int
    tensors: dict[str, Tensor]


def read_generator(state: Mapping[str, Tensor], name: str) -> Generator:
    """Understands a state_dict; refuses what does not fit by naming the first tensor that does not."""
    kinds = _by_kind(state, name)
    convolutions, norms, slopes = kinds["convolution"], kinds["norm"], kinds["slope"]
    keys = [key for key, _ in convolutions]
    shapes = [tuple(layer["weight"].shape) for _, layer in convolutions]
    if len(shapes) < 5:
        raise UserError(f"{name}: has {len(shapes)} convolutions; SRGAN's generator has five or more")
    width, channels = shapes[0][:2]
    num_doublings = sum(shape == (4 * width, width, 3, 3) for shape in shapes)
    num_blocks, odd = divmod(len(shapes) - 3 - num_doublings, 2)
    inside = [(width, width, 3, 3)] * (2 * num_blocks + 1) + [(4 * width, width, 3, 3)] * num_doublings
    wanted = [(width, channels, 9, 9), *inside, (channels, width, 9, 9)]
    for number, (key, shape) in enumerate(zip(keys, shapes, strict=True)):
        if number >= len(wanted) or shape != wanted[number]:
            expected = f"expected {wanted[number]}" if number < len(wanted) else "expected nothing more"
            raise UserError(f"{name}: {key}.weight is {shape}, {expected}: not SRGAN's generator")
    if odd or num_doublings not in SCALES:
        raise UserError(f"{name}: enlarges {2**num_doublings} times; scales are 2, 4 and 8")
    if norms and len(norms) != 2 * num_blocks + 1:
        raise UserError(f"{name}: has {len(norms)} normalisation layers, expected {2 * num_blocks + 1} or none")
    if len(slopes) != 1 + num_blocks + num_doublings:
        raise UserError(f"{name}: has {len(slopes)} PReLUs, expected {1 + num_blocks + num_doublings}")
    for key, layer in slopes:
        if layer["weight"].shape != (1,):
            raise UserError(f"{name}: {key}.weight has {layer['weight'].numel()} slopes, expected one for all channels")
    tensors = _placed(
        [one for _, one in convolutions], [one for _, one in norms], [one for _, one in slopes], num_blocks
    )
    shared = num_blocks > 1 and _repeats(tensors, "blocks") and _repeats(tensors, "doublings")
    settings: dict[str, str | int] = {
        "scale": SCALES[num_doublings],
        "num_blocks": num_blocks,
        "width": width,
        "norm": "batch" if norms else "none",
        "blocks": "shared" if shared else "separate",
        "output": "tanh",
    }
    if shared:
        copies = tuple(f"{part}.{n}." for part in ("blocks", "doublings") for n in range(1, max(num_blocks, 4)))
        tensors = {key: tensor for key, tensor in tensors.items() if not key.startswith(copies)}
    return Generator(settings, channels, {f"generator.{key}": tensor for key, tensor in tensors.items()})


def _by_kind(state: Mapping[str, Tensor], name: str) -> dict[str, list[tuple[str, Layer]]]:
    """The layers with their names, in order, by what they are."""
    layers: dict[str, Layer] = {}
    for key, tensor in state.items():
        owner, _, part = key.removeprefix("module.").rpartition(".")
        layers.setdefault(owner, {})[part] = tensor
    kinds: dict[str, list[tuple[str, Layer]]] = {"convolution": [], "norm": [], "slope": []}
    for key, layer in layers.items():
        weight = layer.get("weight")
        if "running_mean" in layer and weight is not None:
            kinds["norm"].append((key, layer))
        elif weight is not None and weight.dim() == 4:
            kinds["convolution"].append((key, layer))
        elif weight is not None and weight.dim() == 1 and "bias" not in layer:
            kinds["slope"].append((key, layer))
        else:
            raise UserError(f"{name}: {key}.{next(iter(layer))} is no tensor of SRGAN's generator")
    return kinds


def _placed(
    convolutions: Sequence[Layer], norms: Sequence[Layer], slopes: Sequence[Layer], num_blocks: int
) -> dict[str, Tensor]:
    """The tensors by our names, each block and each doubling with its own."""
    after = 2 * num_blocks + 1  # the convolution that ends the body
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
    """Whether all blocks, or all doublings, have the tensors of the first."""
    for key, tensor in tensors.items():
        first, number, rest = (*key.split(".", 2), "", "")[:3]
        if first == part and number != "0" and not torch.equal(tensor, tensors[f"{part}.0.{rest}"]):
            return False
    return True
