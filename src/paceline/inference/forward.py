"""The networks' forward pass on batches of tiles: from stored pixels to values in [-1, 1], and back."""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from paceline.contracts.pixel_format import LUMA, PixelFormat, PixelType
from paceline.images.decode import BadImage
from paceline.inference.image_model import ImageModel

Pixels = npt.NDArray[Any]  # [h, w, c]; uint8, uint16 or float32


class Values(NamedTuple):
    """The networks' results for a batch of tiles."""

    by_name: dict[str, Tensor]  # [n, h, w, c] each, in [-1, 1]
    finite: Tensor  # a boolean; a tensor, so that reading it can wait until the results are used


def pixel_format(image_model: ImageModel, pixels: Pixels) -> PixelFormat:
    """Return the format of pixels: with the range that the networks were trained on, if one was declared."""
    declared, name = image_model.spec.value_range, pixels.dtype.name
    return PixelFormat(cast(PixelType, name), *declared) if declared else PixelFormat.full(name)


def to_unit_range(tiles: Tensor, stored: PixelFormat) -> Tensor:
    """Convert [n, h, w, c] pixels to [n, c, h, w] values in [-1, 1]."""
    images = tiles.float().permute(0, 3, 1, 2)
    if len(images) == 1:
        images = images[0][None]  # otherwise, its strides would select other kernels, which round differently
    return (images - stored.low if stored.low else images) / stored.half - 1


@torch.no_grad()
def transform(image_model: ImageModel, images: Tensor) -> Values:
    """Return the networks' results for [n, c, h, w] images in [-1, 1].

    The images and the networks may have different numbers of channels. Results of the same kind as the input then keep
    the images' channels: grey images are repeated in three channels, whose results are averaged, and networks for grey
    images process each colour separately. Results in other modalities have the networks' channels, and networks for
    grey images process the luma of colour images.
    """
    (count, own), expected = images.shape[:2], image_model.spec.channels
    same_kind = not image_model.spec.panels
    if own < expected:
        images = images.expand(-1, expected, -1, -1)
    elif own > expected:
        luma = images.new_tensor(LUMA).view(1, 3, 1, 1)
        images = images.flatten(0, 1).unsqueeze(1) if same_kind else (images * luma).sum(1, keepdim=True)
    found, finite = {}, []
    for name, made in image_model.recipe.image_to_image(images).items():
        finite.append(made.isfinite().all())
        made = made.view(count, own, *made.shape[2:]) if len(made) > count else made
        made = made.mean(1, keepdim=True) if own < made.shape[1] and same_kind else made
        found[name] = made.permute(0, 2, 3, 1).float().clamp(-1, 1)
    return Values(found, torch.stack(finite).all())


def tensor_of(pixels: Pixels) -> Tensor:
    """Return pixels [h, w, c] as a tensor [1, h, w, c]."""
    return torch.from_numpy(np.stack([pixels]))


def check_finite(finite: bool, precision: str = "fp32") -> None:
    """Raise BadImage if the networks' output is not finite."""
    if not finite:
        hint = "use --precision fp32" if precision != "fp32" else "the weights may be damaged"
        raise BadImage(f"the networks' output is not finite; {hint}")
