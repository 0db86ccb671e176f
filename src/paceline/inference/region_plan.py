"""Which images are processed by region, and the blocks into which they are divided."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import overload

from paceline.core.errors import UserError
from paceline.images.decode import PIXEL_LIMIT, BadImage, TooLarge, memory_limit
from paceline.images.readers import image_size
from paceline.images.regions.open_image import can_be_read_by_region, is_slide, open_region_image
from paceline.images.regions.region_image import Box, Level, RegionImage, choose_box, choose_level
from paceline.inference.receptive_field import ReceptiveField
from paceline.inference.tiles import Tile, Tiling
from paceline.models.windows import Window

OME_FORMAT = "ome-tiff"
SINGLE_TILE_PX = 256  # at least, if the image is computed at once
TIFF_TILES_PX = (512, 256, 128, 64, 32, 16)  # sides of stored tiles; TIFF requires multiples of 16


@dataclass(frozen=True)
class RegionOptions:
    """The part of an image to process, and what to write besides the results."""

    level: int = 0
    magnification: float = 0.0
    region: str = ""  # x,y,width,height
    skip_background: bool = False
    preview: bool = False

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
        flags = {
            "--level": self.level,
            "--magnification": self.magnification,
            "--region": self.region,
            "--skip-background": self.skip_background,
            "--preview": self.preview,
        }
        return tuple(flag for flag, value in flags.items() if value)


WHOLE_IMAGE = RegionOptions()


def check_region_options(options: RegionOptions) -> None:
    """Raise UserError for invalid options."""
    if options.level and options.magnification:
        raise UserError("--level --magnification: cannot be combined; choose one")
    _ = options.box


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
        if _is_small(path):
            return None
        raise


def choose_part(image: RegionImage, options: RegionOptions) -> tuple[int, Box]:
    """Return the requested level of an image, and the requested part of it."""
    level = choose_level(image, options.level, options.magnification)
    return level, choose_box(image.levels[level], options.box)


def _is_small(path: Path) -> bool:
    """Return whether a file that cannot be read by region can be read as a whole, or is no image at all."""
    try:
        image_size(path, memory_limit)
    except TooLarge:
        return False
    except BadImage:
        return True
    return True


@dataclass(frozen=True)
class Block:
    """A part of an image that is computed at once: a tile in the image, and its place in the result."""

    number: int
    tile: Tile
    target: Box


def block_unit(multiple_px: int, scale: int) -> int:
    """Return the number that divides a block's side, so that its result consists of whole TIFF tiles."""
    return math.lcm(multiple_px, TIFF_TILES_PX[-1] // math.gcd(TIFF_TILES_PX[-1], scale))


def block_side(side_px: int, size: tuple[int, int], unit: int, scale: int) -> int:
    """Return the side of a block, a multiple of `unit` of at most `side_px`; for a single block, at least `size`."""
    if side_px < max(size):
        return max(unit, side_px // unit * unit)
    unit = math.lcm(unit, SINGLE_TILE_PX // math.gcd(SINGLE_TILE_PX, scale))
    return -(-max(size) // unit) * unit


def surroundings(box: Box, level: Level, halo_px: int) -> tuple[int, int]:
    """Return the height and width of a part of an image together with its halo, as far as the image reaches."""
    bottom, right = min(level.height, box.top + box.height + halo_px), min(level.width, box.left + box.width + halo_px)
    return bottom - max(0, box.top - halo_px), right - max(0, box.left - halo_px)


def note_on_part(field: ReceptiveField, box: Box, level: Level) -> str:
    """Return a warning if the result for a part of an image differs from that part of the whole result."""
    if not field.obstacles or (box.height, box.width) == (level.height, level.width):
        return ""
    return f"{field.obstacles[0]}: the result differs from the same part of the whole result"


def centre_of(box: Box, side_px: int) -> Box:
    """Return the centre of a part of an image, with sides of at most `side_px`."""
    height, width = min(side_px, box.height), min(side_px, box.width)
    return Box(box.top + (box.height - height) // 2, box.left + (box.width - width) // 2, height, width)


def tiff_tile_px(side_px: int, scale: int) -> int:
    """Return the side of the stored tiles for blocks with this side."""
    return next(side for side in TIFF_TILES_PX if side_px * scale % side == 0)


class Blocks(Sequence[Block]):
    """The blocks of a part of an image, row by row. They are made on demand, since a large image has many."""

    def __init__(self, rows: list[Window], columns: list[Window], box: Box, scale: int) -> None:
        self.rows, self.columns, self.box, self.scale = rows, columns, box, scale

    def __len__(self) -> int:
        return len(self.rows) * len(self.columns)

    @overload
    def __getitem__(self, place: int) -> Block: ...
    @overload
    def __getitem__(self, place: slice) -> list[Block]: ...
    def __getitem__(self, place: int | slice) -> Block | list[Block]:
        if isinstance(place, slice):
            return [self[number] for number in range(len(self))[place]]
        number = range(len(self))[place]
        down, across = divmod(number, len(self.columns))
        tile, scale = Tile(self.rows[down], self.columns[across]), self.scale
        target = Box(
            (tile.row.start - self.box.top) * scale,
            (tile.column.start - self.box.left) * scale,
            (tile.row.stop - tile.row.start) * scale,
            (tile.column.stop - tile.column.start) * scale,
        )
        return Block(number, tile, target)


def plan_blocks(tiling: Tiling, box: Box, size: tuple[int, int], scale: int) -> Blocks:
    """Return the blocks of a part of an image. Their halos may extend beyond the part."""
    fixed = tiling.window_px or (0, 0)
    rows = _windows(tiling, box.top, box.height, size[0], fixed[0])
    columns = _windows(tiling, box.left, box.width, size[1], fixed[1])
    return Blocks(rows, columns, box, scale)


def _windows(tiling: Tiling, offset: int, length: int, total: int, fixed: int) -> list[Window]:
    found, multiple = [], tiling.multiple_px
    for start in range(offset, offset + length, tiling.side_px):
        stop = min(offset + length, start + tiling.side_px)
        first = max(0, (start - tiling.halo_px) // multiple * multiple)
        last = min(total, -(-(stop + tiling.halo_px) // multiple) * multiple)
        if fixed:
            first = max(0, min(start - tiling.halo_px, total - fixed))
            last = min(total, first + fixed)
        found.append(Window(start, stop, first, last))
    return found
