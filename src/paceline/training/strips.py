"""Strips: for a few samples, what came in, what the recipe makes of it and what should come out, side by side."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from PIL import Image

from paceline.contracts.recipe import Batch, Recipe
from paceline.data.crop import Window
from paceline.data.source import Source, sizes_of
from paceline.data.transforms import to_eight_bits, transform
from paceline.images.grids import captioned, one_above_the_other, side_by_side, to_image
from paceline.parallel.precision import Precision
from paceline.training.compile import eager

NUM_STRIPS = 4
LARGEST_SIDE_PX = 256
MULTIPLE_PX = 8  # of a window's side, so that every enlargement divides it


def has_strips(recipe: Recipe) -> bool:
    """Whether the recipe has pictures to show for samples."""
    return type(recipe).preview is not Recipe.preview


def strip_samples(source: Source, device: torch.device, precision: Precision) -> list[Batch]:
    """The centres of the first samples of a source, one to a batch, as the recipe sees them."""
    return list(_centres(source, device, precision))


def _centres(source: Source, device: torch.device, precision: Precision) -> Iterator[Batch]:
    for index, (height, width) in enumerate(sizes_of(source)[:NUM_STRIPS].tolist()):
        rows, columns = (_side(side) for side in (height, width))
        top, left = (
            (side - inner) // 2 // MULTIPLE_PX * MULTIPLE_PX for side, inner in ((height, rows), (width, columns))
        )
        sample = source.read_window(index, Window(top, left, rows, columns))
        raw = {name: torch.from_numpy(np.ascontiguousarray(field))[None].to(device) for name, field in sample.items()}
        pictures = {name: field.permute(0, 3, 1, 2) if field.ndim == 4 else field for name, field in raw.items()}
        pictures["uniforms"] = torch.empty(1, 0)  # nothing is augmented
        yield transform(pictures, None, precision.weights)


def _side(side: int) -> int:
    inner = min(side, LARGEST_SIDE_PX)
    return inner - inner % MULTIPLE_PX if inner > MULTIPLE_PX else inner


@torch.no_grad()
def make_strips(recipe: Recipe, samples: list[Batch], precision: Precision) -> Image.Image:
    """One strip for each sample, one above the other, with captions."""
    recipe.eval()
    strips = []
    for sample in samples:
        with eager(), precision.autocast():
            shown = recipe.preview(sample)
        pictures = {name: to_eight_bits(made)[0].permute(1, 2, 0).cpu().numpy() for name, made in shown.items()}
        strips.append(side_by_side([captioned(to_image(one), name, room=True) for name, one in pictures.items()]))
    recipe.train()
    return one_above_the_other(strips)
