"""How pixels are stored: their data type, and the values that correspond to -1 and 1 in batches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, cast

PixelType = Literal["uint8", "uint16", "float32"]
WHITE = {"uint8": 255.0, "uint16": 65535.0}  # the largest value of each integer type, which is white
MAX_CHANNELS = 64
LUMA = (0.299, 0.587, 0.114)  # ITU-R 601 weights of red, green and blue, as in Pillow's greyscale conversion


@dataclass(frozen=True)
class PixelFormat:
    """The data type of pixels and their range of values. In batches, `low` becomes -1 and `high` becomes 1."""

    dtype: PixelType = "uint8"
    low: float = 0.0
    high: float = 255.0

    @classmethod
    def full(cls, dtype: str) -> PixelFormat:
        """Return the format of an integer type, with its full range."""
        return cls(cast(PixelType, dtype), 0.0, WHITE[dtype])

    @property
    def span(self) -> float:
        """The difference between the largest and the smallest value, which is the peak of PSNR."""
        return self.high - self.low

    @property
    def half(self) -> float:
        """The number of stored units per unit of a batch."""
        return (self.high - self.low) / 2

    @property
    def middle(self) -> float:
        """The value that becomes 0 in batches."""
        return (self.low + self.high) / 2

    @property
    def is_integer(self) -> bool:
        """Whether values are whole numbers, so that results are rounded."""
        return self.dtype != "float32"

    @property
    def is_full_range(self) -> bool:
        """Whether no value of the data type lies outside the range."""
        return (self.low, self.high) == (0.0, WHITE.get(self.dtype))

    @property
    def declared_range(self) -> tuple[float, float] | None:
        """The range as in a data spec: None for the full range of an integer type."""
        return None if self.is_full_range else (self.low, self.high)

    def __str__(self) -> str:
        return self.dtype if self.is_full_range else f"{self.dtype} from {self.low:g} to {self.high:g}"


EIGHT_BITS = PixelFormat()
