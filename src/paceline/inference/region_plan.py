"""Which images are processed by region, and the blocks into which they are divided."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from paceline.core.errors import UserError
from paceline.images.decode import PIXEL_LIMIT, BadImage, TooLarge, memory_limit
from paceline.images.readers import image_size
from paceline.images.rectangles import Box
from paceline.images.regions.open_image import can_be_read_by_region, is_slide, open_region_image
from paceline.images.regions.region_image import Level, RegionImage, choose_box, choose_level
from paceline.inference.receptive_field import ReceptiveField

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
    if options.level < 0:
        raise UserError(f"--level {options.level}: expected a number of at least 0; 0 is the full resolution")
    if options.magnification < 0:
        raise UserError(f"--magnification {options.magnification:g}: expected a positive number, such as 20")
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


def block_unit(multiple_px: int, scale: int) -> int:
    """Return the number that divides a block's side, so that its result consists of whole TIFF tiles."""
    return math.lcm(multiple_px, TIFF_TILES_PX[-1] // math.gcd(TIFF_TILES_PX[-1], scale))


def block_side(side_px: int, size: tuple[int, int], unit: int, scale: int) -> int:
    """Return the side of a block, a multiple of `unit` of at most `side_px`; for a single block, at least `size`."""
    if side_px < max(size):
        return max(unit, side_px // unit * unit)
    unit = math.lcm(unit, SINGLE_TILE_PX // math.gcd(SINGLE_TILE_PX, scale))
    return -(-max(size) // unit) * unit


def note_on_part(field: ReceptiveField, box: Box, level: Level) -> str:
    """Return a warning if the result for a part of an image differs from that part of the whole result."""
    if not field.obstacles or (box.height, box.width) == (level.height, level.width):
        return ""
    return f"{field.obstacles[0]}: the result differs from the same part of the whole result"


def tiff_tile_px(side_px: int, scale: int) -> int:
    """Return the side of the stored tiles for blocks with this side."""
    return next(side for side in TIFF_TILES_PX if side_px * scale % side == 0)
