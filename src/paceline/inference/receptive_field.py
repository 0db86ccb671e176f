"""The receptive field of a network: how much context a tile needs to match the whole image."""

from __future__ import annotations

import copy
import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from paceline.contracts.recipe import Recipe
from paceline.parallel.torch_internals import FakeTensorMode, TorchDispatchMode, is_view


class Axis(NamedTuple):
    """Element i of an axis is computed from the input's elements step·i + before … step·i + after."""

    step: Fraction
    before: Fraction
    after: Fraction

    def seen_through(self, stride: Fraction, first: Fraction, last: Fraction) -> Axis:
        """Return the axis whose element i is computed from this axis's elements stride·i + first … stride·i + last."""
        return Axis(self.step * stride, self.before + self.step * first, self.after + self.step * last)

    def shifted(self, by: int) -> Axis:
        """Return the axis whose element i is computed from this axis's element i + by."""
        return self.seen_through(Fraction(1), Fraction(by), Fraction(by))


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


TRACED_SIDE_PX = 512  # side of the traced image; divisible by common downsampling factors
WHOLE_IMAGE_SIDE_PX = 64  # smaller feature maps may be windows: even 1/8 of the traced image is not smaller

# Operations on single pixels, or on the channels of one pixel. In-place versions have a trailing underscore.
POINTWISE = frozenset(
    (
        *("abs", "add", "alias", "clamp", "clamp_max", "clamp_min", "clone", "contiguous", "copy", "detach", "device"),
        *("div", "dropout", "elu", "empty_like", "exp", "expand", "gelu", "hardsigmoid", "hardswish", "hardtanh"),
        *("leaky_relu", "lerp", "lift_fresh", "log", "maximum", "minimum", "mul", "native_dropout", "neg", "ones_like"),
        *("pow", "prelu", "reciprocal", "relu", "round", "rsqrt", "rsub", "sigmoid", "silu", "split", "sqrt", "square"),
        *("stack", "sub", "tanh", "to", "unbind", "unsqueeze", "where", "zeros_like", "_prelu_kernel", "_to_copy"),
    )
)


@dataclass(frozen=True)
class ReceptiveField:
    """What tiles need in order to produce the same result as the whole image."""

    halo_px: int  # how far beyond a tile's edges input pixels affect its result
    multiple_px: int  # tiles start and end at multiples of this, except at the image's edges
    bytes_per_px: float  # peak memory for intermediate results, per input pixel
    elements_per_px: float  # elements of the largest intermediate result, per input pixel
    obstacles: tuple[str, ...]  # why tiles change the result; empty if they do not
    results: tuple[str, ...]  # the names of the output images
    used: frozenset[int] = field(repr=False)  # id() of each network tensor that was used
    reads_all: bool = False  # whether an operation reads the whole image, so that no halo is sufficient
    is_traced: bool = True  # whether halo_px is known; if not, it can be measured

    @property
    def is_measurable(self) -> bool:
        """Whether the halo is unknown, but may be finite and can be measured."""
        return not self.is_traced and not self.reads_all

    @property
    def tiled_halo_px(self) -> int:
        """The halo of a tile, rounded up to a multiple of `multiple_px`."""
        return math.ceil(self.halo_px / self.multiple_px) * self.multiple_px


def receptive_field(
    image_to_image: Callable[[Tensor], dict[str, Tensor]], channels: int, output_scale: int = 1, window_px: int = 1
) -> ReceptiveField:
    """Return the receptive field of a function that maps images to images `output_scale` times as large.

    If the networks divide images into windows, `window_px` is the size to which tiles must be aligned.
    """
    try:
        with FakeTensorMode(allow_non_fake_inputs=True):
            follower, results = _follow(image_to_image, channels)
    except Exception:  # with some operations, shapes depend on the values; errors of the network occur again here
        follower, results = _follow(image_to_image, channels)
    halo = Fraction(0)
    obstacles = dict.fromkeys(follower.obstacles)
    for result in results.values():
        for axis in follower.axes_of(result) or ():
            if axis.step * output_scale != 1:
                obstacles[f"the network's output is not {output_scale} times as large as its input"] = None
            halo = max(halo, -axis.before, axis.after)
    # The pixels in an enlarged image lie between the input pixels, so one more input pixel is needed.
    halo_px = math.ceil(halo) + (1 if output_scale > 1 else 0)
    return ReceptiveField(
        halo_px,
        math.lcm(follower.multiple, window_px) if follower.untraced else follower.multiple,
        follower.most_bytes / TRACED_SIDE_PX**2,
        follower.most_elements / TRACED_SIDE_PX**2,
        tuple(sorted(obstacles, key=lambda why: why not in follower.reading_all)),  # the more important ones first
        tuple(results),
        frozenset(follower.used),
        reads_all=bool(follower.reading_all),
        is_traced=not follower.untraced,
    )


@torch.no_grad()
def _follow(
    image_to_image: Callable[[Tensor], dict[str, Tensor]], channels: int
) -> tuple[_Follower, dict[str, Tensor]]:
    images = torch.zeros(1, channels, TRACED_SIDE_PX, TRACED_SIDE_PX)
    with _Follower(images) as follower:
        return follower, image_to_image(images)


class _Follower(TorchDispatchMode):  # type: ignore[no-untyped-call, unused-ignore]
    """Tracks which input pixels the elements of each tensor are computed from."""

    def __init__(self, images: Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call, unused-ignore]
        self._axes: dict[int, Axes] = {}
        self.obstacles: list[str] = []
        self.reading_all: set[str] = set()  # the obstacles of operations that read the whole image
        self.untraced = False  # whether rows and columns could not be followed through an operation
        self.used: set[int] = set()
        self.multiple = 1
        self.most_bytes = self._bytes = self.most_elements = 0
        self._remember(images, (IDENTITY, IDENTITY))

    def axes_of(self, tensor: Any) -> Axes | None:
        """Return the index mapping of a tensor; None if the tensor does not depend on the images."""
        return self._axes.get(id(tensor))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        inputs = list(_tensors(args))
        self.used |= {
            id(tensor) for tensor in inputs if isinstance(tensor, nn.Parameter) or type(tensor).__name__ != "FakeTensor"
        }
        known = [axes for axes in map(self.axes_of, inputs) if axes is not None]
        if known:
            axes = self._rule(func.overloadpacket.__name__, func, args, _joined(known))
            if any(len({one[i].step for one in known}) > 1 for i in (0, 1)):
                self._obstruct("the network combines feature maps of different sizes")
            for tensor in _tensors((result,)):
                self._remember(tensor, axes, is_new=not is_view(func))
        return result

    def _remember(self, tensor: Tensor, axes: Axes, *, is_new: bool = True) -> None:
        self.most_elements = max(self.most_elements, tensor.numel())
        if id(tensor) not in self._axes:
            size = tensor.numel() * tensor.element_size() if is_new else 0
            self._bytes += size
            self.most_bytes = max(self.most_bytes, self._bytes)
            weakref.finalize(tensor, self._forget, id(tensor), size)
        self._axes[id(tensor)] = axes
        self.multiple = math.lcm(self.multiple, *(axis.step.numerator for axis in axes))

    def _forget(self, number: int, size: int) -> None:
        self._axes.pop(number, None)
        self._bytes -= size

    def _obstruct(self, why: str, *, reads_all: bool = False, untraced: bool = False) -> None:
        if why not in self.obstacles:
            self.obstacles.append(why)
        if reads_all:
            self.reading_all.add(why)
        self.untraced |= untraced

    def _rule(self, name: str, func: Any, args: Sequence[Any], axes: Axes) -> Axes:
        """Return the index mapping of an operation's result, given the mapping of its input."""
        if name.removesuffix("_") in POINTWISE:
            return axes
        if name == "cat":
            if (args[1] if len(args) > 1 else 0) % args[0][0].dim() >= args[0][0].dim() - 2:
                self._obstruct("the network concatenates features along rows or columns", untraced=True)
            return axes
        if name == "convolution":
            weight, stride, padding, dilation, is_transposed = args[1], args[3], args[4], args[5], args[6]
            kernel = weight.shape[2:]
            follow = transposed if is_transposed else window
            return both(axes, follow, kernel, stride, padding, dilation)
        if name in ("max_pool2d_with_indices", "avg_pool2d", "max_pool2d"):
            kernel = args[1]
            stride = args[2] if len(args) > 2 and args[2] else kernel
            padding = args[3] if len(args) > 3 else (0, 0)
            dilation = args[4] if name.startswith("max") and len(args) > 4 else (1, 1)
            return both(axes, window, kernel, stride, padding, dilation)
        if name in ("reflection_pad2d", "replication_pad2d", "constant_pad_nd"):
            left, _, *more = args[1]
            top = more[0] if more else 0
            return axes[0].shifted(-top), axes[1].shifted(-left)
        if name == "pixel_shuffle":
            return both(axes, spread, (args[1], args[1]), (0, 0))
        if name.startswith(("upsample_", "_upsample_")):
            return self._enlarged(name, args, axes)
        if name in ("native_batch_norm", "_native_batch_norm_legit", "_native_batch_norm_legit_no_training"):
            if name != "_native_batch_norm_legit_no_training" and args[5]:
                self._obstruct("the network normalises using statistics from the whole image")
            return axes
        if name in ("slice", "narrow"):
            return _sliced(args, axes)
        if name in ("view", "_unsafe_view", "reshape"):
            if tuple(args[1])[-2:] != tuple(args[0].shape[-2:]):
                self._obstruct("the network rearranges rows and columns", untraced=True)
            return axes
        if name in ("mean", "sum", "amax", "amin", "linalg_vector_norm"):
            place = 2 if name == "linalg_vector_norm" else 1  # position of the argument `dim`
            dims = args[place] if len(args) > place and args[place] else range(args[0].dim())
            if any(dim % args[0].dim() >= args[0].dim() - 2 for dim in dims):
                is_image = args[0].dim() == 4 and min(args[0].shape[-2:]) >= WHOLE_IMAGE_SIDE_PX
                self._obstruct("the network pools over the whole image", reads_all=is_image)
            return axes
        if "pool" in name or ("norm" in name and name != "native_layer_norm"):
            self._obstruct(f"the network reads the whole image ({name})", reads_all=True)
        else:
            self._obstruct(f"the receptive field of the operation {name!r} is not known", untraced=True)
        return axes

    def _enlarged(self, name: str, args: Sequence[Any], axes: Axes) -> Axes:
        """Return the index mapping for upsampling: each pixel is computed from its neighbours in the input."""
        reach = 0 if "nearest" in name else 1 if "bilinear" in name else 2

        def enlarge(axis: Axis, before: int, after: int) -> Axis:
            if after % before == 0:
                return spread(axis, Fraction(after, before), reach)
            self._obstruct(f"the network resizes {before} to {after} pixels, but only integer factors are supported")
            # The step follows from the size of the result. Multiplied factors would give a meaningless fraction.
            return axis._replace(step=Fraction(TRACED_SIDE_PX, after))

        return both(axes, enlarge, args[0].shape[-2:], args[1])


def _sliced(args: Sequence[Any], axes: Axes) -> Axes:
    tensor, dim, start = args[0], args[1] if len(args) > 1 else 0, args[2] if len(args) > 2 else 0
    place = dim % tensor.dim() - (tensor.dim() - 2)
    if place < 0 or not start:
        return axes
    rows, columns = axes
    return (rows.shifted(start), columns) if place == 0 else (rows, columns.shifted(start))


def _joined(known: Sequence[Axes]) -> Axes:
    """Return the index mapping for an operation on several tensors, covering the receptive fields of all of them."""
    rows, columns = (
        Axis(axes[0].step, min(axis.before for axis in axes), max(axis.after for axis in axes))
        for axes in zip(*known, strict=True)
    )
    return rows, columns


def _tensors(values: Any) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


WINDOW_SIZES = ("window_size", "win_size", "split_size", "stripe_size")  # attributes of modules that use windows
STRIP_LENGTHS_PX = (256, 512, 1024)
SHORTEST_SIDE_PX = 16  # some networks pad smaller images
INVISIBLE = 1e-12  # smaller changes are rounding errors
SAME = 1e-9  # largest difference between a tile and the same part of the whole strip, in float64


def window_multiple(network: nn.Module) -> int:
    """Return the least common multiple of the sizes of the windows into which a network divides images."""
    sizes = {size for module in network.modules() for name in WINDOW_SIZES for size in _sizes(vars(module).get(name))}
    return math.lcm(*sizes)


def measured_field(recipe: Recipe, channels: int, field: ReceptiveField) -> ReceptiveField:
    """Return the receptive field with a measured halo; if tiles still differ, with the reason as an obstacle."""
    exact = copy.deepcopy(recipe).double().eval()
    device = next(exact.parameters()).device
    strips = _Strips(exact.image_to_image, channels, field.multiple_px, recipe.output_scale, device)
    with torch.no_grad():
        reaches = [strips.reach(dim) for dim in (-2, -1)]
        if None in reaches:
            beyond = f"the result depends on pixels more than {STRIP_LENGTHS_PX[-1] // 2} pixels away"
            return replace(field, obstacles=(beyond,), is_traced=True)
        halo = max(reach for reach in reaches if reach is not None)
        measured = replace(field, halo_px=halo, obstacles=(), is_traced=True)
        if not all(strips.tile_is_same(dim, measured.tiled_halo_px) for dim in (-2, -1)):
            return replace(measured, obstacles=("the result depends on the position in the image",))
    return measured


class _Strips:
    """Long narrow random images, and a function that maps images to images."""

    def __init__(
        self,
        image_to_image: Callable[[Tensor], dict[str, Tensor]],
        channels: int,
        multiple: int,
        scale: int,
        device: torch.device,
    ) -> None:
        self.image_to_image, self.channels, self.scale, self.device = image_to_image, channels, scale, device
        self.multiple = multiple
        self.side = math.ceil(SHORTEST_SIDE_PX / multiple) * multiple
        self.generator = torch.Generator().manual_seed(0)

    def reach(self, dim: int) -> int | None:
        """Return how many pixels beyond a tile's edge affect the tile; None if more than half of the longest strip."""
        for length in STRIP_LENGTHS_PX:
            middle = max(2, length // 2 // self.multiple) * self.multiple
            strip, other = (self._strip(dim, 2 * middle) for _ in range(2))
            start, other_start = (one.narrow(dim, 0, middle) for one in (strip, other))
            end, other_end = (one.narrow(dim, middle, middle) for one in (strip, other))
            whole = self._rows(strip, dim)
            with_other_end = self._rows(torch.cat([start, other_end], dim), dim)
            with_other_start = self._rows(torch.cat([other_start, end], dim), dim)
            unchanged_before = int(_first(with_other_end, whole))
            unchanged_after = int(_first(with_other_start.flip(0), whole.flip(0)))
            reach = math.ceil((middle * self.scale - min(unchanged_before, unchanged_after)) / self.scale)
            if reach <= middle - self.multiple:
                return max(0, reach)
        return None

    def tile_is_same(self, dim: int, halo: int) -> bool:
        """Return whether the middle of a strip is the same if it is computed from a tile with this halo."""
        length = 2 * halo + 4 * self.multiple
        strip = self._strip(dim, length)
        whole = self._rows(strip, dim)
        tile = self._rows(strip.narrow(dim, self.multiple, length - 2 * self.multiple), dim)
        inner = slice(halo * self.scale, (halo + 2 * self.multiple) * self.scale)
        offset = self.multiple * self.scale
        wanted = whole[inner.start + offset : inner.stop + offset]
        return bool((tile[inner] - wanted).abs().max() < SAME)

    def _strip(self, dim: int, length: int) -> Tensor:
        shape = [1, self.channels, self.side, self.side]
        shape[dim] = length
        # Values from -0.5 to 0.5: results beyond [-1, 1] would be clipped, which hides changes.
        return (torch.rand(shape, dtype=torch.float64, generator=self.generator) - 0.5).to(self.device)

    def _rows(self, strip: Tensor, dim: int) -> Tensor:
        """Return all results for a strip, with its long side as the first dimension."""
        results = [made.movedim(dim, 0).flatten(1) for made in self.image_to_image(strip).values()]
        return torch.cat(results, dim=1)


def _first(rows: Tensor, others: Tensor) -> Tensor:
    """Return the index of the first row that differs; the number of rows if none does."""
    differs = (rows - others).abs().amax(1) > INVISIBLE
    return torch.where(differs.any(), differs.int().argmax(), torch.tensor(len(differs), device=rows.device))


def _sizes(value: object) -> Iterator[int]:
    for one in value if isinstance(value, list | tuple) else [value]:
        if isinstance(one, int) and not isinstance(one, bool) and one > 0:
            yield one
