"""Evaluators whose metrics can be added up over the regions of an image."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import NamedTuple

from torch import Tensor

from paceline.contracts.pixel_format import PixelFormat
from paceline.contracts.recipe import Batch


class Quality(NamedTuple):
    """The metrics of a whole image."""

    psnr: float
    ssim: float


class MeasuredByRegion(ABC):
    """An evaluator that compares images with their targets by PSNR and SSIM."""

    pixels: PixelFormat
    border: int  # number of pixels at each edge that are ignored

    @property
    @abstractmethod
    def compared(self) -> tuple[str, ...]:
        """The names of the images that may be compared with a target."""

    @abstractmethod
    def pairs(self, prediction: dict[str, Tensor], batch: Batch) -> dict[str, tuple[Tensor, Tensor]]:
        """Return the levels of each predicted image and of its target, in a region."""

    @abstractmethod
    def add_region(self, pairs: Mapping[str, tuple[Tensor, Tensor]]) -> None:
        """Add a region to the sums that do not depend on other regions; regions do not overlap."""

    @abstractmethod
    def add_image(self, qualities: Mapping[str, Quality]) -> None:
        """Add the metrics of a whole image, by the name of the compared image."""
