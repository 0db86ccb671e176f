"""Compares images with their targets, as a whole or by region: the files of any program, or a model's results."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.config.settings import RunSettings
from paceline.contracts.data_spec import EIGHT_BITS, PixelFormat
from paceline.contracts.recipe import Batch
from paceline.core.errors import UserError
from paceline.core.ordered_map import num_cores, ordered_map
from paceline.core.registry import load_class
from paceline.core.watch import beat
from paceline.data.image_files import ImageFiles, SampleRegions
from paceline.data.source import Sample, sizes_of
from paceline.data.stream import stored, to_unit_range
from paceline.evaluation.contract import Case, Evaluator
from paceline.evaluation.image_metrics import (
    CLASSES,
    PEAK,
    WINDOW,
    ImageEvaluator,
    decibels,
    luma,
    pixel_counts,
    ssim,
)
from paceline.evaluation.protocol import Protocol
from paceline.images.decode import BadImage, decode
from paceline.images.deep import GREY_AND_RGB, PlanesHeader, UnusablePlanes, read_deep, read_planes_header, to_format
from paceline.images.rectangles import Box, Span, Tile, split_side
from paceline.images.regions import RegionImage, open_any_image
from paceline.inference.tiles import Tiling, choose_tiling, tiling_warning, usable_halo
from paceline.inference.trained import TrainedModel
from paceline.parallel.precision import Precision
from paceline.parallel.world import World
from paceline.runs.finished_run import open_run
from paceline.training.compile import eager

Limits = tuple[float, float] | None


class Pair(NamedTuple):
    """A result and its target, as levels [1, c, h, w] from 0 to the peak."""

    made: Tensor
    real: Tensor
    pixels: PixelFormat
    are_colours: bool  # whether both are grey or RGB images


def read_pair(result: Path, target: Path, limits: Limits) -> Pair:
    """Return both images.

    Grey and RGB images are compared in 8 bits, stacks of planes in the depth of the deeper file, and floating-point
    images in the range `limits`. Raise UserError if the images cannot be compared.
    """
    with _naming(target):
        headers = [_header(target)]
    headers.append(_header(result))
    if not any(header and (header.is_stack or header.dtype.kind == "f") for header in headers):
        one = decode(result)
        with _naming(target):
            other = decode(target)
        if one.size != other.size:
            sizes = f"{one.width}×{one.height} pixels, but {target} is {other.width}×{other.height}"
            raise UserError(f"is {sizes}")
        mode = "L" if one.mode == other.mode == "L" else "RGB"
        made, real = (levels_of(np.asarray(image.convert(mode))) for image in (one, other))
        return Pair(made, real, EIGHT_BITS, are_colours=True)
    arrays = [read_deep(result).pixels]
    with _naming(target):
        arrays.append(read_deep(target).pixels)
    if arrays[0].shape != arrays[1].shape:
        shapes = [f"{w}×{h} pixels with {c} channel{'s' * (c > 1)}" for h, w, c in (array.shape for array in arrays)]
        raise UserError(f"is {shapes[0]}, but {target} is {shapes[1]}")
    names = {array.dtype.name for array in arrays}
    is_integer = names <= {"uint8", "uint16"}
    if not is_integer and limits is None:
        raise UserError("has floating-point pixels; set their range with --value-range LOW,HIGH")
    pixels = PixelFormat.of("uint16" if "uint16" in names else "uint8")
    if not is_integer:
        pixels = PixelFormat("float32", *(limits or ()))
    made, real = (levels_of(to_format(array, pixels), pixels.low) for array in arrays)
    are_colours = made.shape[1] in GREY_AND_RGB and not any(header and header.are_positions for header in headers)
    return Pair(made, real, pixels, are_colours)


@contextmanager
def _naming(target: Path) -> Iterator[None]:
    """Replace BadImage for a target with a UserError that names the target."""
    try:
        yield
    except BadImage as error:
        raise UserError(f"its target {target} cannot be used: {error}") from None


def _header(path: Path) -> PlanesHeader | None:
    try:
        return read_planes_header(path)
    except UnusablePlanes:
        return None  # the first page may be a grey or RGB image


def levels_of(pixels: NDArray[Any], low: float = 0) -> Tensor:
    """Return pixels [h, w] or [h, w, c] as float64 levels [1, c, h, w], counted from `low`."""
    levels = pixels.astype(np.float64) - low
    return torch.from_numpy(levels[..., np.newaxis] if levels.ndim == 2 else levels).permute(2, 0, 1)[None]


BLOCK_PX = 1024  # side of the blocks that are compared at a time, in float64
OVERLAP_PX = WINDOW - 1  # how far an SSIM window that starts in a block extends beyond it


@dataclass(frozen=True)
class Comparison:
    """A block of an image that is compared with the target: its place, and the part of the image that counts."""

    tile: Tile  # the halo is the overlap for SSIM
    inside: Box  # the image without its border

    def sums(self, made: Tensor, real: Tensor, peak: float) -> Sums:
        """Return the sums for a block, given its area as levels [1, c, h, w]."""
        top, left, height, width = self.inside
        own_rows, own_columns = _part(self.tile.row, top, height), _part(self.tile.column, left, width)
        squares = (made - real)[..., own_rows, own_columns].square()
        # The first row and column of every SSIM window that starts in this block and ends inside the image.
        first_rows = _part(self.tile.row, top, height - OVERLAP_PX)
        first_columns = _part(self.tile.column, left, width - OVERLAP_PX)
        num_windows = (first_rows.stop - first_rows.start) * (first_columns.stop - first_columns.start)
        likeness = 0.0
        if num_windows:
            rows, columns = (slice(one.start, one.stop + OVERLAP_PX) for one in (first_rows, first_columns))
            likeness = ssim(made[..., rows, columns], real[..., rows, columns], peak).item() * num_windows
        return Sums(squares.sum().item(), squares.numel(), likeness, num_windows)

    def own(self, levels: Tensor) -> Tensor:
        """Return the part of a block's area that no other block covers, border included."""
        return levels[..., *self.tile.inner(1)]


def _part(span: Span, first: int, length: int) -> slice:
    """Return the rows of a block, counted from its start, among `length` rows of the image from the first one on."""
    start = max(span.start, first)
    return slice(start - span.start, max(start, min(span.stop, first + length)) - span.start)


class Sums(NamedTuple):
    """The sums over one or several blocks of an image."""

    squares: float = 0.0
    num_values: float = 0
    likeness: float = 0.0
    num_windows: float = 0

    @classmethod
    def total(cls, parts: Iterable[Sums]) -> Sums:
        """Add up the sums of blocks."""
        return cls(*map(math.fsum, zip(*parts, strict=True)))

    def psnr(self, peak: float) -> float:
        """Return the peak signal-to-noise ratio in dB."""
        return decibels(torch.tensor(self.squares / self.num_values, dtype=torch.float64), peak).item()

    def ssim(self) -> float:
        """Return the structural similarity, averaged over windows and channels."""
        return self.likeness / self.num_windows


def inside_border(height: int, width: int, border: int) -> Box:
    """Return an image without its border; raise UserError if it is smaller than SSIM's window."""
    if min(height, width) - 2 * border < WINDOW:
        raise UserError(
            f"{width}×{height} pixels is too small to compare; SSIM needs at least {WINDOW}×{WINDOW} inside the border"
        )
    return Box(border, border, height - 2 * border, width - 2 * border)


def blocks_of(height: int, width: int, border: int) -> Iterator[Comparison]:
    """Yield the blocks in which an image is compared."""
    inside = inside_border(height, width, border)
    for row in split_side(height, BLOCK_PX, 0, after=OVERLAP_PX):
        for column in split_side(width, BLOCK_PX, 0, after=OVERLAP_PX):
            yield Comparison(Tile(row, column), inside)


@dataclass(frozen=True, eq=False)
class RegionComparison:
    """The metrics of a pair of files."""

    psnr: float
    ssim: float
    counts: Tensor  # pixels per class, as in `evaluation.overlap`; zero unless masks are compared
    pixels: PixelFormat
    channels: int


def compare_regions(result: Path, target: Path, protocol: str, border: int, *, masks: bool) -> RegionComparison:
    """Return the same PSNR and SSIM as for whole images; raise UserError if the files cannot be compared."""
    with ExitStack() as stack:
        made = stack.enter_context(open_any_image(result))
        with _naming(target):
            real = stack.enter_context(open_any_image(target))
        _check(made, real, target, protocol, masks)
        pixels, level = PixelFormat.of(made.format.dtype.name), made.levels[0]

        def measure(block: Comparison) -> tuple[Sums, Tensor]:
            one, other = (levels_of(image.read(0, block.tile.area)) for image in (made, real))
            shown = [block.own(levels) * (PEAK / pixels.span) for levels in (one, other)] if masks else []
            counts = pixel_counts(*shown) if masks else torch.zeros(len(CLASSES), 3, dtype=torch.float64)
            if protocol == "y":
                one, other = luma(one, pixels.span), luma(other, pixels.span)
            return block.sums(one, other, pixels.span), counts

        total, counts = Sums(), torch.zeros(len(CLASSES), 3, dtype=torch.float64)
        for sums, found in ordered_map(measure, blocks_of(level.height, level.width, border), min(num_cores(), 4)):
            total, counts = Sums.total([total, sums]), counts + found
    return RegionComparison(total.psnr(pixels.span), total.ssim(), counts, pixels, made.format.channels)


def _check(made: RegionImage, real: RegionImage, target: Path, protocol: str, masks: bool) -> None:
    one, other = made.levels[0], real.levels[0]
    if (one.height, one.width) != (other.height, other.width):
        raise UserError(f"is {one.width}×{one.height} pixels, but {target} is {other.width}×{other.height}")
    if (made.format.channels, made.format.dtype) != (real.format.channels, real.format.dtype):
        kinds = [f"{image.format.dtype} with {image.format.channels} channels" for image in (made, real)]
        raise UserError(f"is {kinds[0]}, but {target} is {kinds[1]}")
    if made.format.channels not in (1, 3) and (masks or protocol == "y"):
        flag = "--masks" if masks else "--protocol y"
        raise UserError(f"it has {made.format.channels} channels, but {flag} needs 1 or 3")


LARGEST_TILE_PX = 1024  # side of the compared part of a result, unless a wide halo needs larger tiles
HALOS_PER_TILE = 4
RESAMPLING_PX = 4  # input pixels beyond the halo, for bicubic filters with which a recipe makes low-resolution images
RESULT_BYTES = 400_000_000  # reserved for comparing tiles, in float64
WAITING_BYTES = 300_000_000  # of tiles that wait to be predicted


@dataclass(frozen=True)
class SplitMetrics:
    """The metrics of a split, and how they were measured."""

    metrics: dict[str, float]
    protocol: Protocol
    notes: tuple[str, ...]
    texts: dict[str, str]  # the metrics with their units, by name


class RegionEvaluation:
    """Evaluates a model on the images of a source."""

    def __init__(
        self,
        image_model: TrainedModel,
        source: ImageFiles,
        split: str,
        world: World,
        precision: Precision,
        settings: RunSettings,
    ) -> None:
        """Raise UserError if the recipe cannot be evaluated by region."""
        self.recipe, self.source, self.world, self.precision = image_model.recipe, source, world, precision
        self.scale, self.pixels = self.recipe.output_scale, source.spec.pixel_format
        evaluator_class = load_class("evaluator", self.recipe.evaluation.evaluator, Evaluator)
        if not issubclass(evaluator_class, ImageEvaluator):
            raise _unsupported(source, f"the evaluator {self.recipe.evaluation.evaluator} needs whole images")
        if self.recipe.window_px:
            raise _unsupported(source, "with batchnorm=instance, images are normalised in windows")
        case = Case(source, split, len(source), open_run, self.scale, by_region=True)
        self.evaluator = evaluator_class(case, source.spec, world.device, settings)
        self.field = image_model.tiled_field
        self.num_pixels = int(sizes_of(source).prod(axis=1).sum())

    def measure(self, advance: Callable[[int], None]) -> SplitMetrics:
        """Return the metrics; `advance` is called with the number of pixels that all ranks have evaluated so far."""
        evaluator, notes, divided, done = self.evaluator, list[str](), list[Tiling](), 0
        totals = torch.zeros(len(self.source), len(evaluator.compared), 4, dtype=torch.float64)
        for index, (height, width) in enumerate((sizes_of(self.source) // self.scale).tolist()):
            tiling = self._tiling(height, width)
            notes += [tiling.note] if tiling.note else []
            divided += [tiling] if max(height, width) > tiling.side_px else []
            with self.source.regions(index, self.world.place.local_size) as regions:
                for tile, sums in self._compared(regions, (height, width), tiling):
                    beat()
                    for name, part in sums.items():
                        totals[index, evaluator.compared.index(name)] += torch.tensor(part, dtype=torch.float64)
                    done += tile.own.num_pixels
                    advance(min(done * self.scale**2 * self.world.size, self.num_pixels))
        totals = self.world.sum(totals.to(self.world.device)).cpu()
        if self.world.is_first:  # so that each image counts once in the sum over ranks
            for table in totals.tolist():
                for name, row in zip(evaluator.compared, table, strict=True):
                    if row[1]:
                        values = [[Sums(*row).psnr(self.pixels.span)], [Sums(*row).ssim()]]
                        evaluator.add_images(name, torch.tensor(values, dtype=torch.float64).unbind())
        metrics = evaluator.results(self.world.sum(evaluator.sums()))
        texts = type(evaluator).texts(metrics, self.source.spec)
        protocol = {**evaluator.protocol(), **self.recipe.evaluation.conditions}
        return SplitMetrics(metrics, protocol, (*evaluator.notes, _describe(divided), *dict.fromkeys(notes)), texts)

    def _compared(
        self, regions: SampleRegions, size: tuple[int, int], tiling: Tiling
    ) -> Iterator[tuple[Tile, dict[str, Sums]]]:
        """Yield this rank's tiles of an image, with the sums of each compared image."""
        (height, width), evaluator = size, self.evaluator
        inside = inside_border(height * self.scale, width * self.scale, evaluator.border)
        tiles = [Tile(row, column) for row in self._spans(tiling, height) for column in self._spans(tiling, width)]

        def read(tile: Tile) -> tuple[Tile, Sample]:
            return tile, regions.read(tile.area.scaled(self.scale))

        side = (tiling.side_px + 2 * tiling.halo_px) * self.scale
        tile_bytes = 2 * side**2 * self.source.spec.channels * np.dtype(self.pixels.dtype).itemsize
        for tile, sample in ordered_map(
            read,
            tiles[self.world.rank :: self.world.size],
            num_cores(),
            num_bytes=lambda _: tile_bytes,
            max_bytes=WAITING_BYTES,
        ):
            rows, columns = (self._compared_span(span, length) for span, length in zip(tile, size, strict=True))
            comparison = Comparison(Tile(rows, columns), inside)
            place = comparison.tile.area.moved_from(tile.area.scaled(self.scale))
            pairs = evaluator.pairs(*self._predicted(sample, place))
            evaluator.add_region(
                {name: (comparison.own(made), comparison.own(real)) for name, (made, real) in pairs.items()}
            )
            yield tile, {name: comparison.sums(*pair, self.pixels.span) for name, pair in pairs.items()}

    @torch.no_grad()
    def _predicted(self, sample: Sample, place: Box) -> tuple[dict[str, Tensor], Batch]:
        """Return a part of the prediction for a sample, and the same part of the batch."""
        device, dtype = self.world.device, self.precision.weights
        batch = {}
        for name, array in sample.items():
            images = stored(torch.from_numpy(array.copy())).to(device)[None].permute(0, 3, 1, 2)
            batch[name] = to_unit_range(images, self.pixels, dtype)
        try:
            with eager(), self.precision.autocast():
                prediction = self.recipe.predict(batch)
        except KeyError as error:
            if error.args[0] in self.recipe.draws:
                raise _unsupported(self.source, "the recipe degrades whole images at random") from None
            raise
        cut = (..., *place.slices)
        prediction, batch = ({name: images[cut] for name, images in fields.items()} for fields in (prediction, batch))
        return prediction, batch

    def _tiling(self, height: int, width: int) -> Tiling:
        """Return tiles that fit in memory, with the halo that makes predictions exact, if there is one."""
        sharing = self.world.size if self.world.device.type == "cpu" else 1
        fitting = choose_tiling(
            self.field, (height, width), self.world.device, share=sharing, result_bytes=RESULT_BYTES
        )
        halo, multiple = usable_halo(self.field), self.field.multiple_px
        side = min(fitting.side_px, max(LARGEST_TILE_PX // self.scale, HALOS_PER_TILE * halo))
        if max(height, width) <= side:
            return Tiling(fitting.side_px, 0)
        note, side = fitting.note or tiling_warning(self.field), max(multiple, side // multiple * multiple)
        return Tiling(side, fitting.halo_px or halo, note, multiple_px=multiple)

    def _spans(self, tiling: Tiling, length: int) -> list[Span]:
        """Return the tiles along a side. SSIM's window and bicubic filters also need pixels beyond a tile."""
        halo, after = tiling.halo_px + RESAMPLING_PX, -(-OVERLAP_PX // self.scale)
        return split_side(length, tiling.side_px, halo, multiple=tiling.multiple_px, after=after)

    def _compared_span(self, span: Span, length: int) -> Span:
        """Return the part of the target that a tile is compared with, and the overlap for SSIM, along one side."""
        start, stop = span.start * self.scale, span.stop * self.scale
        return Span(start, stop, start, min(length * self.scale, stop + OVERLAP_PX))


def _describe(divided: list[Tiling]) -> str:
    """Describe how images were evaluated, given the tilings of those that were divided into tiles."""
    if not divided:
        return "the images were read by region, and each was evaluated in one piece"
    side, halo = max(tiling.side_px for tiling in divided), max(tiling.halo_px for tiling in divided)
    return f"the images were evaluated by region, in tiles of up to {side} pixels with a halo of {halo}"


def _unsupported(source: ImageFiles, reason: str) -> UserError:
    what = f"{source.name_of(0)}: the data has images that must be evaluated by region, but {reason}"
    return UserError(f"{what}; use `paceline apply` and `paceline measure`")
