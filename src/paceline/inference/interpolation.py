"""Interpolation between the random inputs of two generated images."""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.contracts.recipe import Batch, Recipe


def interpolate_draws(recipe: Recipe, ends: Batch, steps: int) -> Batch:
    """Interpolate between random inputs in each pair of rows: spherically if normally distributed, else linearly.

    All images between two rows have the class of the first one.
    """
    shares = torch.linspace(0, 1, steps)
    between = {}
    for name, rows in ends.items():
        if name == recipe.class_draw:  # classes cannot be interpolated
            between[name] = rows[::2].repeat_interleave(steps)
            continue
        interpolate = slerp if recipe.draws[name].kind == "normal" else torch.lerp
        flat = rows.reshape(len(rows), -1).double()
        pairs = zip(flat[::2], flat[1::2], strict=True)
        moved = torch.stack([torch.stack([interpolate(a, b, share.to(a)) for share in shares]) for a, b in pairs])
        between[name] = moved.to(rows.dtype).reshape(-1, *rows.shape[1:])
    return between


def slerp(start: Tensor, end: Tensor, share: Tensor) -> Tensor:
    """Return the point a given fraction along the arc between two vectors (spherical linear interpolation)."""
    angle = torch.arccos((start @ end / (start.norm() * end.norm())).clamp(-1, 1))
    if not angle.sin().abs() >= 1e-6:  # the vectors are parallel, or one is 0 (NaN), so interpolate linearly
        return torch.lerp(start, end, share)
    return (((1 - share) * angle).sin() * start + (share * angle).sin() * end) / angle.sin()
