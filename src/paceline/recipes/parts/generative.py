"""Declarations shared by all recipes that generate images from noise."""

from __future__ import annotations

from torch import nn

from paceline.contracts.recipe import Best, DataSpec, Recipe
from paceline.core.errors import UserError


class GenerativeRecipe(Recipe):
    """Generates images from noise; evaluated by FID against the training images."""

    generator: nn.Module  # created by the subclass

    evaluator = "generation"
    evaluated_on = "train"
    best = Best("train/FID", "min")
    generates = True
    ema = ("generator",)


def check_size(spec: DataSpec, sizes_px: tuple[int, ...]) -> None:
    """Raise UserError unless the images are square, with a side that the networks support."""
    if spec.height == spec.width and spec.height in sizes_px:
        return
    sizes = f"{', '.join(map(str, sizes_px[:-1]))} or {sizes_px[-1]}"
    raise UserError(
        f"the images are {spec.width}×{spec.height} pixels, but the networks need square images with a side of "
        f"{sizes}: use --set size=32, or another of these sizes"
    )
