"""Applies networks to images by region, which bounds memory use: which images, and the blocks they are divided into."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import groupby, islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paceline.core.errors import UserError
from paceline.core.ordered_map import num_cores, ordered_map
from paceline.core.terminal import counted
from paceline.core.text import printable
from paceline.core.types import JsonObject
from paceline.images.decode import PIXEL_LIMIT, BadImage, TooLarge, memory_limit
from paceline.images.deep import image_size
from paceline.images.encode import check_channels, write_image
from paceline.images.pyramid_file import PyramidFile, PyramidFormat, partial_files, purpose_of
from paceline.images.rectangles import Box, Tile
from paceline.images.regions import (
    Pixels,
    RegionImage,
    can_be_read_by_region,
    choose_box,
    choose_level,
    is_slide,
    open_region_image,
)
from paceline.inference.apply import AppliedImage, Applier, ApplierSettings, ApplyProgress, Outcome, apply_whole
from paceline.inference.files import ApplyPlan, ImageTask, SkippedImage
from paceline.inference.tiles import (
    Landing,
    Tiling,
    is_out_of_memory,
    plan_tiles,
    tiles_of_training_size,
    tiling_warning,
    usable_halo,
)
from paceline.inference.trained import TrainedModel

OME_FORMAT = "ome-tiff"
SINGLE_TILE_PX = 256  # at least, if the image is computed at once
TIFF_TILES_PX = (512, 256, 128, 64, 32, 16)  # sides of stored tiles; TIFF requires multiples of 16


@dataclass(frozen=True)
class RegionOptions:
    """The part of an image to process, and whether its background is skipped."""

    level: int = 0
    magnification: float = 0.0
    region: str = ""  # x,y,width,height
    skip_background: bool = False

    @property
    def box(self) -> Box | None:
        """The region, in pixels of the chosen level; None for the whole image. Raise UserError if it is not valid."""
        if not self.region:
            return None
        try:
            left, top, width, height = (int(number) for number in self.region.split(","))
        except ValueError:
            raise UserError(f"--region {self.region}: expected X,Y,WIDTH,HEIGHT in pixels") from None
        if min(left, top) < 0 or min(width, height) < 1:
            raise UserError(f"--region {self.region}: expected a positive size, and X and Y of at least 0")
        return Box(top, left, height, width)

    @property
    def given(self) -> tuple[str, ...]:
        """The flags that only apply to images that are processed by region."""
        return tuple(f"--{name.replace('_', '-')}" for name, value in asdict(self).items() if value)

    def check(self) -> None:
        """Raise UserError for invalid options."""
        if self.level and self.magnification:
            raise UserError("--level --magnification: cannot be combined; choose one")
        _ = self.box


def region_size(path: Path, options: RegionOptions, *, is_forced: bool = False) -> tuple[int, int] | None:
    """Return the height and width to process if an image is processed by region, otherwise None."""
    is_forced = is_forced or bool(options.given) or is_slide(path)
    if not can_be_read_by_region(path):
        if is_forced:
            flag = options.given[0] if options.given else "--format"
            raise BadImage(f"{flag}: only for TIFF files and whole slides, which can be read by region")
        return None
    try:
        with open_region_image(path) as image:
            _, box = choose_part(image, options)
            level, is_forced = image.levels[0], is_forced or image.only_by_region
            return (box.height, box.width) if is_forced or level.height * level.width > PIXEL_LIMIT else None
    except BadImage:
        if is_forced:
            raise
        with suppress(BadImage):  # reading the image as a whole reports other problems
            try:
                image_size(path, memory_limit)
            except TooLarge:
                is_forced = True
        if is_forced:
            raise
        return None


@dataclass(frozen=True)
class TaskSize:
    """The number of pixels of an image, and whether it is processed by region."""

    num_pixels: int
    by_region: bool


def read_headers(plan: ApplyPlan, options: RegionOptions, format_: str = "") -> dict[ImageTask, TaskSize]:
    """Return the size of each task with a valid image header; mark the others as skipped."""
    sizes: dict[ImageTask, TaskSize] = {}
    for task in counted(plan.tasks, "reading image headers", len(plan.tasks)):
        try:
            region = region_size(Path(task.path), options, is_forced=format_ == OME_FORMAT)
            height, width = region or image_size(Path(task.path), memory_limit)
            sizes[task] = TaskSize(height * width, region is not None)
        except BadImage as error:
            plan.skipped.append(SkippedImage(task.path, str(error)))
    return sizes


def apply_all(
    applier: Applier, sizes: Mapping[ImageTask, TaskSize], options: RegionOptions, progress: ApplyProgress
) -> Iterator[Outcome]:
    """Yield the outcome of each image, in order. Images that are processed by region are processed one at a time."""
    by_region = RegionApplier(applier, options)
    for is_region, tasks in groupby(sizes, key=lambda task: sizes[task].by_region):
        if is_region:
            yield from (by_region.process(task, progress) for task in tasks)
        else:
            yield from apply_whole(applier, {task: sizes[task].num_pixels for task in tasks}, progress.advance)


def choose_part(image: RegionImage, options: RegionOptions) -> tuple[int, Box]:
    """Return the requested level of an image, and the requested part of it."""
    level = choose_level(image, options.level, options.magnification)
    return level, choose_box(image.levels[level], options.box)


def block_unit(multiple_px: int, scale: int) -> int:
    """Return the number that divides a block's side, so that its result consists of whole TIFF tiles."""
    return math.lcm(multiple_px, TIFF_TILES_PX[-1] // math.gcd(TIFF_TILES_PX[-1], scale))


def block_side(side_px: int, size: tuple[int, int], unit: int, scale: int) -> int:
    """Return the side of a block, a multiple of `unit` of at most `side_px`; for a single block, at least `size`."""
    if side_px < max(size):
        return max(unit, side_px // unit * unit)
    unit = math.lcm(unit, SINGLE_TILE_PX // math.gcd(SINGLE_TILE_PX, scale))
    return -(-max(size) // unit) * unit


def identity_of(
    path: Path, level: int, box: Box, settings: ApplierSettings, options: RegionOptions, weights: str
) -> dict[str, Any]:
    """Return what must be equal: the image, the part of it, the weights, and what affects the results."""
    status = path.stat()
    return {
        "image": [str(path), status.st_size, status.st_mtime_ns],
        "part": [level, *box],
        "weights": weights,
        "tile": settings.tile,
        "precision": settings.precision,
        "compression": settings.encoding.compression,
        "skip_background": options.skip_background,
    }


def division_in(purpose: JsonObject | None, identity: dict[str, Any]) -> tuple[Tiling, dict[str, int]] | None:
    """Return the tiles and the number of channels of each result in a journal, if its file was for the same results.

    A resumed command keeps them, even if the amount of free memory differs.
    """
    if purpose is None or any(purpose.get(key) != value for key, value in identity.items()):
        return None
    stored: Any = purpose
    try:
        window = stored["tiling"]["window_px"]
        tiling = Tiling(**{**stored["tiling"], "window_px": tuple(map(int, window)) if window else None})
        channels = {str(name): int(count) for name, count in stored["channels"].items()}
        return (tiling, channels) if min(tiling.side_px, tiling.multiple_px) > 0 else None
    except (KeyError, TypeError, ValueError, AttributeError):
        return None


def weights_digest(image_model: TrainedModel) -> str:
    """Return a SHA-256 checksum of the checksums of a model's weights, which are computed on all cores."""

    def checksum(item: tuple[str, Tensor]) -> bytes:
        name, tensor = item
        digest = hashlib.sha256(name.encode())
        digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
        return digest.digest()

    tensors = image_model.recipe.state_dict().items()
    return hashlib.sha256(b"".join(ordered_map(checksum, tensors, num_cores()))).hexdigest()


DARKEST, MOST_COLOUR = 0.86, 0.06  # of white: the darkest background, and its largest difference between channels
LARGEST_SHARE = 0.001  # of other pixels in a background region


def is_background(pixels: Pixels) -> bool:
    """Return whether a region contains only background."""
    white = np.iinfo(pixels.dtype).max
    darkest, brightest = pixels.min(axis=-1), pixels.max(axis=-1)
    other = (darkest < DARKEST * white) | (brightest - darkest > MOST_COLOUR * white)
    return bool(other.mean() <= LARGEST_SHARE)


INPUT_BYTES, RESULT_BYTES = 300_000_000, 400_000_000  # of blocks that wait to be computed, or to be written
LARGEST_BLOCK_PX = {"cuda": 2048, "cpu": 1024}  # side of a block, unless --tile or a large halo makes it larger
HALOS_PER_BLOCK = 8  # a block is this many times as wide as its halo, if memory allows
PROBE_PX, LARGEST_PROBE_HALO_PX = 64, 256
WHOLE, SKIPPED = 0, 1  # flags of a block


@dataclass(frozen=True, eq=False)
class _Job:
    """An image, the part of it to process, and how it is divided."""

    image: RegionImage
    level: int
    box: Box
    tiling: Tiling
    blocks: list[Tile]
    files: dict[str, PyramidFile]


class RegionApplier:
    """Applies an image model to images that are read and written by region."""

    def __init__(self, applier: Applier, options: RegionOptions) -> None:
        self.applier, self.options = applier, options
        self.image_model, self.composer, self.pool = applier.image_model, applier.composer, applier.pool
        self.scale = self.image_model.output_scale
        self._digest = ""

    def process(self, task: ImageTask, progress: ApplyProgress) -> AppliedImage | SkippedImage:
        """Compute and write all results for an image. A file that cannot be used is skipped."""
        try:
            with open_region_image(Path(task.path), self.image_model.spec.channels) as image:
                return self._process(task, image, progress)
        except BadImage as problem:
            return SkippedImage(task.path, str(problem))
        except OSError as error:
            what = f"--out: cannot write the results for {printable(task.path)}: {error.strerror or error}"
            hint = "run the same command again to resume, with --skip-existing if other images are complete"
            raise UserError(f"{what}; {hint}") from error
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            advice = "a tile does not fit in memory; use --tile with a smaller size"
            raise UserError(f"{printable(task.path)}: {advice}") from None

    def _process(self, task: ImageTask, image: RegionImage, progress: ApplyProgress) -> AppliedImage:
        with ExitStack() as stack:
            job = self._start(task, image, stack)
            done = min(file.num_blocks_done for file in job.files.values())
            for file in job.files.values():
                file.keep_blocks(done)
            progress.advance(sum(block.own.num_pixels for block in islice(job.blocks, done)), earlier=True)
            for block, tiles, flag in self._computed(job, islice(job.blocks, done, None)):
                _for_each(job.files, lambda name, file: file.append_block(tiles[name], flag))  # noqa: B023
                progress.advance(block.own.num_pixels)
            level, read = image.levels[job.level], partial(image.read, job.level)
            tiling = self.composer.with_changes(job.tiling, read, job.box, (level.height, level.width))
            flags = next(iter(job.files.values())).flags()
            resumed = f"resumed after {done:,} of {len(job.blocks):,} tiles" if done else ""
            _for_each(job.files, lambda name, file: file.complete(Path(task.path).stem))
            _for_each(job.files, lambda name, file: file.publish())  # after all are complete: this is not resumed
        job = replace(job, tiling=tiling)
        return AppliedImage(self._summary(task, job, [self._write_mask(task, job, flags), resumed]))

    def _start(self, task: ImageTask, image: RegionImage, stack: ExitStack) -> _Job:
        """Divide an image, and open its result files: new ones, or those of a command that was killed."""
        settings = self.applier.settings
        if settings.downsample or settings.panel:
            flag = "--downsample" if settings.downsample else "--panel"
            raise BadImage(f"{flag}: not supported for images that are processed by region")
        level, box = choose_part(image, self.options)
        check_channels(image.format.channels, self.image_model.spec.channels)
        if self.image_model.spec.value_range:
            raise BadImage("networks that were trained with a value_range cannot be applied by region")
        targets = {name: task.make_target(name) for name in self.image_model.results}
        first = next(iter(targets.values()))
        if first.suffix != ".tif":
            raise BadImage("images that are processed by region are written as TIFF; leave --format out")
        self._digest = self._digest or weights_digest(self.image_model)
        identity = identity_of(Path(task.path), level, box, settings, self.options, self._digest)
        division = division_in(purpose_of(partial_files(first)[1]), identity)
        tiling, channels = division or (self._tiling(image, level, box), self._channels(image))
        size = (image.levels[level].height, image.levels[level].width)
        blocks = plan_tiles(tiling, size, box)
        purpose = {**identity, "tiling": asdict(tiling), "channels": channels}
        files = {}
        for name, target in targets.items():
            form = PyramidFormat(
                box.height * self.scale,
                box.width * self.scale,
                channels[name],
                image.format.dtype.name,
                next(side for side in TIFF_TILES_PX if tiling.side_px * self.scale % side == 0),
                1 if settings.encoding.compression is None else settings.encoding.compression,
                image.format.microns_per_px * image.levels[level].downsample / self.scale,
                image.format.profile if channels[name] == image.format.channels else b"",
                target.name.lower().endswith(".ome.tif"),
            )
            files[name] = PyramidFile(target, form, (_target(block, box, self.scale) for block in blocks), purpose)
            stack.callback(files[name].close)
        return _Job(image, level, box, tiling, blocks, files)

    def _computed(self, job: _Job, blocks: Iterable[Tile]) -> Iterator[tuple[Tile, dict[str, list[bytes]], int]]:
        """Yield the blocks, in order, with their compressed tiles and flags."""
        skips = self.options.skip_background
        fill = self._background_fill(job) if skips else {}
        result_px = self.scale**2 * sum(file.form.channels for file in job.files.values())

        def read(block: Tile) -> tuple[Tile, Pixels | None]:
            pixels = job.image.read(job.level, block.area)
            return block, None if skips and is_background(pixels[block.inner(1)]) else pixels

        def compute(opened: tuple[Tile, Pixels | None]) -> tuple[Tile, Landing | None]:
            block, pixels = opened
            return block, None if pixels is None else self.pool.run([pixels], block.inner(self.scale))

        def encode(computed: tuple[Tile, Landing | None]) -> tuple[Tile, dict[str, list[bytes]], int]:
            block, landing = computed
            target, tiles = _target(block, job.box, self.scale), {}
            made = landing.arrays() if landing else {}
            for name, file in job.files.items():
                if landing:
                    pixels = made[name][0]
                else:
                    pixels = np.broadcast_to(fill[name], (target.height, target.width, len(fill[name])))
                tiles[name] = file.encode_block(target, pixels)
            return block, tiles, WHOLE if landing else SKIPPED

        side = job.tiling.side_px + 2 * job.tiling.halo_px
        block_bytes = side**2 * job.image.format.channels * job.image.format.dtype.itemsize
        opened = ordered_map(read, blocks, num_cores(), num_bytes=lambda _: block_bytes, max_bytes=INPUT_BYTES)
        computed = ordered_map(compute, opened, len(self.pool.runners))
        encoded = ordered_map(
            encode,
            computed,
            num_cores(),
            num_bytes=lambda item: item[0].own.num_pixels * result_px,
            max_bytes=RESULT_BYTES,
        )
        try:
            yield from encoded
        finally:
            encoded.close()
            computed.close()
            opened.close()

    def _tiling(self, image: RegionImage, level: int, box: Box) -> Tiling:
        """Return tiles that fit in memory and are large enough to keep the overhead of the halo low."""
        composer, recipe = self.composer, self.image_model.recipe
        if composer.field.is_measurable:
            composer.field = self.image_model.tiled_field
        field, size = composer.field, (box.height, box.width)
        unit = block_unit(field.multiple_px, self.scale)
        if recipe.window_px and not composer.tile_px:
            whole = tiles_of_training_size(recipe.window_px, size)
            unit = block_unit(1, self.scale)
        else:
            at_once = 3 if image.format.channels > self.image_model.spec.channels else 1
            halo = usable_halo(field)
            whole_size = (image.levels[level].height, image.levels[level].width)
            seen = size if field.obstacles else box.grown(halo, whole_size)[2:]
            whole = composer.choose_tiling(*seen, at_once, RESULT_BYTES)
            whole = replace(whole, halo_px=whole.halo_px or (0 if field.obstacles else halo))  # also for one tile
            usual = composer.tile_px or LARGEST_BLOCK_PX[composer.device.type]
            most = max(usual, HALOS_PER_BLOCK * field.tiled_halo_px)
            if whole.side_px > most or (whole.halo_px == 0 and max(size) > most):
                whole = replace(whole, side_px=most, halo_px=halo, note=whole.note or tiling_warning(field))
        side = block_side(whole.side_px, size, unit, self.scale)
        tiling = replace(whole, side_px=side, multiple_px=field.multiple_px)
        is_part = size != (image.levels[level].height, image.levels[level].width)
        if field.obstacles and is_part and not tiling.note:
            note = f"{field.obstacles[0]}: the result differs from the same part of the whole result"
            return replace(tiling, note=note)
        return tiling

    def _channels(self, image: RegionImage) -> dict[str, int]:
        """Return the number of channels of each result, by computing a small one."""
        unit = self.composer.field.multiple_px
        side = -(-PROBE_PX // unit) * unit
        pixels = np.zeros((side, side, image.format.channels), image.format.dtype)
        return {name: made.shape[-1] for name, made in self.pool.run([pixels]).arrays().items()}

    def _background_fill(self, job: _Job) -> dict[str, Pixels]:
        """Return the networks' output for white, which is the colour of skipped blocks, by result."""
        multiple = job.tiling.multiple_px
        side = -(-(2 * min(self.composer.field.tiled_halo_px, LARGEST_PROBE_HALO_PX) + 16) // multiple) * multiple
        white = np.full((side, side, job.image.format.channels), np.iinfo(job.image.format.dtype).max)
        made = self.pool.run([white.astype(job.image.format.dtype)]).arrays()
        return {name: values[0, side * self.scale // 2, side * self.scale // 2] for name, values in made.items()}

    def _write_mask(self, task: ImageTask, job: _Job, flags: list[int]) -> str:
        """Write the mask of skipped blocks, if requested; return a remark about it."""
        if not task.mask:
            return ""
        across = sum(block.row == job.blocks[0].row for block in job.blocks)
        mask = np.array([255 if flag == WHOLE else 0 for flag in flags], np.uint8).reshape(-1, across, 1)
        write_image(Path(task.mask), mask)
        return f"{flags.count(SKIPPED):,} of {len(flags):,} tiles are background → {printable(task.mask)}"

    def _summary(self, task: ImageTask, job: _Job, notes: list[str]) -> str:
        size, tiles = (job.box.height, job.box.width), ""
        if len(job.blocks) > 1:
            cost = sum(block.area.num_pixels for block in job.blocks) / job.box.num_pixels - 1
            halo = f"halo {job.tiling.halo_px} ({cost:.0%} more pixels)"
            tiles = f", {len(job.blocks):,} tiles of {job.tiling.side_px} pixels, {halo}"
        return self.applier.summarise(task, size, tiles, (job.tiling.note, job.image.format.note, *notes))


def _target(block: Tile, part: Box, scale: int) -> Box:
    """Return the place of a block in the result for a part of an image."""
    return block.own.moved_from(part).scaled(scale)


def _for_each(files: dict[str, PyramidFile], work: Callable[[str, PyramidFile], None]) -> None:
    """Call `work` for all files in parallel, and wait for all calls."""
    for _ in ordered_map(lambda item: work(*item), files.items(), len(files)):
        pass
