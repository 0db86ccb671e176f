"""IoU and Dice for segmentations in which colours represent classes."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

CLASSES = ("bright", "red", "green", "blue")
MIDDLE = 127.5  # middle of the levels 0…255
ALIKE = 64  # a pixel whose channels differ by fewer levels than this is grey


def pixel_counts(made: Tensor, real: Tensor) -> Tensor:
    """Return pixel counts [class, 3]: in both segmentations, in the first one, and in the second one."""
    one, other = members(made), members(real)
    pixels = torch.stack([one & other, one, other], dim=1)  # shape [class, 3, ...]
    return pixels.flatten(2).sum(dim=2, dtype=torch.float64)


def members(levels: Tensor) -> Tensor:
    """Return a mask of the pixels in each class, as [class, n, h, w]."""
    brightest, colour = levels.max(dim=1)
    above = brightest > MIDDLE
    grey = brightest - levels.min(dim=1).values < ALIKE
    return torch.stack([above & grey, *(above & ~grey & (colour == number) for number in range(3))])


def overlaps(sums: Tensor) -> dict[str, float]:
    """Return IoU and Dice for the classes that occur in the real segmentations, and their means."""
    found = {
        name: (both / (made + real - both), 2 * both / (made + real))
        for name, (both, made, real) in zip(CLASSES, sums.view(-1, 3).tolist(), strict=True)
        if real
    }
    if not found:
        return {}
    results = {"iou": mean_of(iou for iou, _ in found.values()), "dice": mean_of(dice for _, dice in found.values())}
    if len(found) > 1:
        for name, (iou, dice) in found.items():
            results |= {f"iou_{name}": iou, f"dice_{name}": dice}
    return results


def mean_of(values: Iterable[float]) -> float:
    listed = list(values)
    return sum(listed) / len(listed)
