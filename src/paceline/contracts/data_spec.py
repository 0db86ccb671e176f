"""The data spec: what a source declares about its samples."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

# Names with a special meaning, in the setting `panels` and as fields of a sample.
INPUT, SEGMENTATION, LEFT_OUT = "image", "segmentation", "-"


@dataclass(frozen=True)
class DataSpec:
    """What a source declares about its samples, for the recipe that trains on them."""

    channels: int
    height: int
    width: int
    num_classes: int = 0
    class_names: tuple[str, ...] = ()
    flip_allowed: bool = True  # a flipped image is still a valid sample; False for digits and letters
    scale: int = 0  # the field "low" is "image" downsampled by this factor; 0: there is no field "low"
    panels: tuple[str, ...] = ()  # names of the fields aligned with "image", the segmentation last


def output_panels(names: Iterable[str]) -> tuple[str, ...]:
    """Return the panels to predict from the input, the segmentation last."""
    targets = [name for name in names if name not in (INPUT, LEFT_OUT)]
    return tuple(sorted(targets, key=lambda name: name == SEGMENTATION))
