"""The data spec: the properties of a source's samples, such as their size, classes and pixel format."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, Literal, cast, get_args

from paceline.core.text import short_repr

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
    def of(cls, dtype: str, limits: tuple[float, float] | None = None) -> PixelFormat:
        """Return the format of a data type with a range; by default, the full range of an integer type."""
        return cls(cast(PixelType, dtype), *(limits or (0.0, WHITE[dtype])))

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


# Names with a special meaning in the setting `panels` and as fields of a sample.
INPUT, SEGMENTATION, LEFT_OUT = "image", "segmentation", "-"
LARGEST = 10**6  # upper limit for sizes, channels and classes in a file
LARGEST_FLOAT32 = 3.4e38


@dataclass(frozen=True)
class DataSpec:
    """The properties of the samples, which a source declares for the recipe.

    Attributes:
        channels: Number of channels in the field "image": 1 for greyscale, 3 for RGB, or any other number up to 64.
        height: Height of "image" in pixels.
        width: Width of "image" in pixels.
        num_classes: Number of classes in "label"; 0 if the samples have no label.
        class_names: The name of each class; empty if the classes have no names.
        flip_allowed: Whether a flipped image is still a valid sample; False for digits and letters.
        scale: The factor by which "image" is downsampled to get the field "low"; 0 if there is no field "low".
        panels: The names of the image fields aligned with "image", in order, with the segmentation last.
        dtype: Data type of the pixels: "uint8", "uint16" or "float32".
        value_range: The pixel values that are scaled to -1 and 1; None for the full range of an integer type.
        empty_classes: Indices of the classes without training images. A run determines them; a source need not.

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
    dtype: PixelType = "uint8"
    value_range: tuple[float, float] | None = None
    empty_classes: tuple[int, ...] = ()

    @property
    def pixel_format(self) -> PixelFormat:
        """The data type of the pixels, with their range of values."""
        return PixelFormat.of(self.dtype, self.value_range)

    @property
    def classes(self) -> tuple[str, ...]:
        """The class names, or the class indices if the classes have no names."""
        return self.class_names or tuple(map(str, range(self.num_classes)))

    def __repr__(self) -> str:
        return short_repr(self)


def written_values(spec: DataSpec) -> dict[str, Any]:
    """Return the values of a data spec for a file.

    Older versions of Paceline do not know `empty_classes`, so it is left out if there are none.
    """
    values = asdict(spec)
    if not spec.empty_classes:
        del values["empty_classes"]
    return values


def parse_spec(values: Any) -> DataSpec:
    """Return a data spec, given its values in a file; raise ValueError, KeyError or TypeError if they are invalid."""
    values = {"dtype": "uint8", "value_range": None, "empty_classes": [], **values}  # which older versions do not write
    empty, limits, num_classes = values["empty_classes"], values["value_range"], values["num_classes"]
    texts, sizes = ("class_names", "panels"), ("channels", "height", "width", "num_classes", "scale")
    right = {
        **{name: _is_list_of((str,), values[name]) for name in texts},
        **{name: type(values[name]) is int and 0 <= values[name] <= LARGEST for name in sizes},
        "flip_allowed": type(values["flip_allowed"]) is bool,
        "dtype": values["dtype"] in get_args(PixelType),
        "empty_classes": _is_list_of((int,), empty) and len(set(empty)) == len(empty) < max(1, num_classes),
    }
    if wrong := [name for name, is_right in right.items() if not is_right]:
        raise ValueError(f"{wrong[0]} has an invalid value")
    if not all(0 <= number < num_classes for number in empty):
        raise ValueError("empty_classes is not a list of class numbers")
    if limits is None and values["dtype"] == "float32":
        raise TypeError("value_range is missing")
    if limits is not None:
        if not _is_list_of((int, float), limits) or len(limits) != 2:
            raise TypeError("value_range is not a pair of numbers")
        if not -LARGEST_FLOAT32 <= limits[0] < limits[1] <= LARGEST_FLOAT32:  # also false for NaN and any integer
            raise ValueError("value_range is not an increasing pair of finite numbers")
        limits = float(limits[0]), float(limits[1])
    lists = {name: tuple(values[name]) for name in (*texts, "empty_classes")}
    return DataSpec(**{**values, **lists, "value_range": limits})


def _is_list_of(kinds: tuple[type, ...], values: object) -> bool:
    return isinstance(values, list) and all(type(value) in kinds for value in values)


def output_panels(names: Iterable[str]) -> tuple[str, ...]:
    """Return the names of the panels (images) to predict from the input, with the segmentation last."""
    targets = [name for name in names if name not in (INPUT, LEFT_OUT)]
    return tuple(sorted(targets, key=lambda name: name == SEGMENTATION))
