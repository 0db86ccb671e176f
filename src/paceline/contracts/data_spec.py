"""The data spec: what a source declares about its samples."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from paceline.core.short_repr import short_repr

# Names with a special meaning, in the setting `panels` and as fields of a sample.
INPUT, SEGMENTATION, LEFT_OUT = "image", "segmentation", "-"


@dataclass(frozen=True)
class DataSpec:
    """What a source declares about its samples, for the recipe.

    Attributes:
        channels: Number of channels of "image": 1 for greyscale, 3 for RGB.
        height: Height of "image" in pixels.
        width: Width of "image" in pixels.
        num_classes: Number of classes of "label"; 0 if the samples have no label.
        class_names: The name of each class; empty if they have none.
        flip_allowed: Whether a flipped image is still a valid sample; False for digits and letters.
        scale: The field "low" is "image" downsampled by this factor; 0 if there is no such field.
        panels: The fields aligned with "image", by name, in order, the segmentation last.

    Examples:
        >>> paceline.DataSpec(channels=1, height=28, width=28, num_classes=10, flip_allowed=False)
        DataSpec(channels=1, height=28, width=28, num_classes=10, flip_allowed=False)
    """

    channels: int
    height: int
    width: int
    num_classes: int = 0
    class_names: tuple[str, ...] = ()
    flip_allowed: bool = True
    scale: int = 0
    panels: tuple[str, ...] = ()

    def __repr__(self) -> str:
        return short_repr(self)


def output_panels(names: Iterable[str]) -> tuple[str, ...]:
    """Return the panels to predict from the input, the segmentation last."""
    targets = [name for name in names if name not in (INPUT, LEFT_OUT)]
    return tuple(sorted(targets, key=lambda name: name == SEGMENTATION))
