"""Evaluates a model on images that are larger than memory: PSNR, SSIM and mask overlap are summed over blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from paceline.config.settings import RunSettings
from paceline.contracts.recipe import Batch
from paceline.core.errors import UserError
from paceline.core.ordered_map import num_cores, ordered_map
from paceline.core.registry import load_class
from paceline.core.watch import beat
from paceline.data.image_files import ImageFiles, SampleRegions
from paceline.data.source import Sample, sizes_of
from paceline.data.stream import stored, to_unit_range
from paceline.evaluation.contract import Case, Evaluator
from paceline.evaluation.image_metrics import ImageEvaluator
from paceline.evaluation.protocol import Protocol
from paceline.images.rectangles import Box, Span, Tile, split_side
from paceline.inference.compare_images import OVERLAP_PX, Comparison, Sums, inside_border
from paceline.inference.tiles import Tiling, choose_tiling, tiling_warning, usable_halo
from paceline.inference.trained import TrainedModel
from paceline.parallel.precision import Precision
from paceline.parallel.world import World
from paceline.runs.finished_run import open_run
from paceline.training.compile import eager

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
                    done += tile.num_pixels
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
