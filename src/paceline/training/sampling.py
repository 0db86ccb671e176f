"""Pictures that a recipe makes of random numbers alone."""

from __future__ import annotations

import numpy as np
import torch

from paceline.contracts.recipe import Batch, Recipe
from paceline.core.errors import UserError
from paceline.data.draws import Drawer
from paceline.data.transforms import to_eight_bits
from paceline.parallel.precision import Precision
from paceline.training.compile import eager

PICTURES_AT_ONCE = 64


@torch.no_grad()
def make_pictures(recipe: Recipe, draws: Batch, precision: Precision) -> np.ndarray:
    """The recipe's picture for each row of draws, as uint8 [n, h, w, c]."""
    learns = recipe.training
    recipe.eval()
    pictures = []
    for start in range(0, len(next(iter(draws.values()))), PICTURES_AT_ONCE):
        with eager(), precision.autocast():
            rows = {name: values[start : start + PICTURES_AT_ONCE] for name, values in draws.items()}
            pictures.append(to_eight_bits(recipe.predict(rows)["image"]))
    recipe.train(learns)
    return torch.cat(pictures).permute(0, 2, 3, 1).cpu().numpy()


def fixed_draws(recipe: Recipe, drawer: Drawer, count: int) -> Batch:
    """The draws of the first samples of a run: the same throughout training and after it."""
    if not recipe.generates:
        raise UserError(f"{type(recipe).__name__} has no generator: it makes no pictures of random numbers alone")
    return drawer.rows("samples", 0, count)
