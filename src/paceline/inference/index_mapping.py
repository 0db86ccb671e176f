"""Index mappings: which elements of an image the elements of a feature map are computed from, along each axis."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import NamedTuple


class Axis(NamedTuple):
    """Element i of an axis is computed from the input's elements step·i + before … step·i + after."""

    step: Fraction
    before: Fraction
    after: Fraction

    def seen_through(self, stride: Fraction, first: Fraction, last: Fraction) -> Axis:
        """Return the axis whose element i is computed from this axis's elements stride·i + first … stride·i + last."""
        return Axis(self.step * stride, self.before + self.step * first, self.after + self.step * last)


Axes = tuple[Axis, Axis]  # rows and columns, the last two dimensions
IDENTITY = Axis(Fraction(1), Fraction(0), Fraction(0))


def both(axes: Axes, rule: Callable[..., Axis], *pairs: Sequence[int]) -> Axes:
    """Apply an index mapping to rows and columns. Each argument has one value per axis, or one value for both."""
    each = [[pair[i] if len(pair) > 1 else pair[0] for pair in pairs] for i in (0, 1)]
    return rule(axes[0], *each[0]), rule(axes[1], *each[1])


def window(axis: Axis, kernel: int, stride: int, padding: int, dilation: int) -> Axis:
    """Return the index mapping of a sliding window: output i starts reading at stride·i - padding."""
    return axis.seen_through(Fraction(stride), Fraction(-padding), Fraction(dilation * (kernel - 1) - padding))


def transposed(axis: Axis, kernel: int, stride: int, padding: int, dilation: int) -> Axis:
    """Return the index mapping of a transposed convolution: output i reads every input whose window covers it."""
    first, last = Fraction(padding - dilation * (kernel - 1), stride), Fraction(padding, stride)
    return axis.seen_through(Fraction(1, stride), first, last)


def spread(axis: Axis, factor: int | Fraction, reach: int) -> Axis:
    """Return the index mapping for upsampling: output i reads the nearest input, and `reach` more on each side."""
    factor = Fraction(factor)
    return axis.seen_through(1 / factor, -(factor - 1) / factor - reach, Fraction(reach))


def at(shift: int) -> tuple[Fraction, Fraction, Fraction]:
    """Return the arguments of `seen_through` for a shift."""
    return Fraction(1), Fraction(shift), Fraction(shift)


def adaptive(axes: Axes, before: Sequence[int], after: Sequence[int]) -> Axes:
    """Return the index mapping of adaptive pooling to a size.

    If the size divides that of the input, the pooled windows are assumed to have the same size in images of any size.
    """
    if min(after) == 1 or before[0] % after[0] or before[1] % after[1]:
        return axes
    kernel = (before[0] // after[0], before[1] // after[1])
    return both(axes, window, kernel, kernel, (0, 0), (1, 1))
