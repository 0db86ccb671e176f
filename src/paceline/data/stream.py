"""The data stream: tickets (a sample's index and every random number for it), crop windows, pixels, draws, transforms.

Each sample depends only on its own row of random numbers, and all operations round the same way on every device. So a
sample is bit-identical with every loader, however samples are batched.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from hashlib import blake2b
from itertools import permutations
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.config.settings import RunSettings
from paceline.contracts.data_spec import EIGHT_BITS, PixelFormat
from paceline.contracts.recipe import Batch, DataSpec, Draw
from paceline.core.errors import UserError
from paceline.images.rectangles import Box

NUM_UNIFORMS = 8  # random numbers in [0, 1) per sample
# The column of `uniforms` that each augmentation reads.
CROP_ROW, CROP_COLUMN, FLIP, CUTOUT_ROW, CUTOUT_COLUMN, ROT90, COLOURS = range(7)


class Tickets(NamedTuple):
    """The tickets (indices and random numbers) of several samples, one row per sample."""

    index: NDArray[np.int64]  # type: ignore[assignment]  # [n]: sample indices in the source
    uniforms: NDArray[np.float32]  # shape [n, NUM_UNIFORMS]

    def rows(self, start: int, stop: int) -> Tickets:
        """Return the tickets for rows [start, stop)."""
        return Tickets(self.index[start:stop], self.uniforms[start:stop])


class Shuffle(NamedTuple):
    """How samples are shuffled: as a whole or, for sources with slow random access, in blocks.

    Blocks of consecutive samples are put in random order. Then the samples of `mixed` blocks at a time are shuffled
    together, so that reading an epoch touches only a few blocks at any time.
    """

    block: int = 0  # number of samples per block; 0 shuffles all samples together
    mixed: int = 1  # number of blocks whose samples are shuffled together


FULL = Shuffle()


@lru_cache(maxsize=2)
def tickets(seed: int, epoch: int, length: int, shuffle: Shuffle = FULL) -> Tickets:
    """Return the tickets for an epoch: a permutation of the samples, with a row of random numbers per position."""
    generator = np.random.Generator(np.random.Philox(key=np.array([seed, epoch], dtype=np.uint64)))
    order = _in_blocks(generator, length, shuffle) if shuffle.block else generator.permutation(length)
    return Tickets(order, generator.random((length, NUM_UNIFORMS), dtype=np.float32))


def _in_blocks(generator: np.random.Generator, length: int, shuffle: Shuffle) -> NDArray[np.int64]:
    """Return a permutation that shuffles blocks, and then the samples within groups of blocks."""
    starts = generator.permutation(np.arange(0, length, shuffle.block))
    blocks = [np.arange(start, min(start + shuffle.block, length)) for start in starts]
    groups = [np.concatenate(blocks[at : at + shuffle.mixed]) for at in range(0, len(blocks), shuffle.mixed)]
    return np.concatenate([generator.permutation(group) for group in groups])


class Stream:
    """The endless sequence of training samples, epoch after epoch. A position is the number of samples before it."""

    def __init__(self, seed: int, length: int, shuffle: Shuffle = FULL) -> None:
        self.seed, self.length, self.shuffle = seed, length, shuffle

    def take(self, start: int, stop: int) -> Tickets:
        """Return the tickets at positions [start, stop), which may span epochs."""
        pieces = []
        while start < stop:
            epoch, offset = divmod(start, self.length)
            count = min(stop - start, self.length - offset)
            pieces.append(tickets(self.seed, epoch, self.length, self.shuffle).rows(offset, offset + count))
            start += count
        return Tickets(np.concatenate([p.index for p in pieces]), np.concatenate([p.uniforms for p in pieces]))


def part(start: int, stop: int, number: int, parts: int) -> tuple[int, int]:
    """Split a range into `parts` contiguous parts, whose sizes differ by at most one; return part `number`."""
    length = stop - start
    return start + length * number // parts, start + length * (number + 1) // parts


def in_order(start: int, stop: int) -> Tickets:
    """Return tickets for evaluation: samples in source order, without randomness."""
    return Tickets(np.arange(start, stop), np.zeros((stop - start, NUM_UNIFORMS), dtype=np.float32))


def in_order_with_crops(start: int, stop: int, length: int) -> Tickets:
    """Return tickets for the evaluation of crops: at random places, which are the same in every run."""
    ordered = in_order(start, stop)
    ordered.uniforms[:, CROP_ROW : CROP_COLUMN + 1] = _places(length)[start:stop]
    return ordered


@lru_cache(maxsize=2)
def _places(length: int) -> NDArray[np.float32]:
    generator = np.random.Generator(np.random.Philox(key=0))
    return generator.random((length, CROP_COLUMN + 1 - CROP_ROW), dtype=np.float32)


MAX_NAMED = 3  # maximum number of images listed in an error message


def ratio_of(name: str, scale: int) -> int:
    """Return how many pixels of "image" a pixel of a sample's field covers, along one side."""
    return scale if name == "low" and scale else 1


def cut(sample: dict[str, NDArray[Any]], window: Box, scale: int) -> dict[str, NDArray[Any]]:
    """Crop every image of a sample to the window, which is divided by the scale for the low-resolution image."""
    return {
        name: field[Box(*(side // ratio_of(name, scale) for side in window)).slices] if field.ndim == 3 else field
        for name, field in sample.items()
    }


def corners(uniforms: Tensor, sizes: Tensor, crop: int, scale: int) -> Tensor:
    """Return the top-left corners of the samples' windows, int64 [n, 2]. If scale > 0, they are multiples of it."""
    step = max(1, scale)
    places = torch.div(sizes - crop, step, rounding_mode="floor") + 1
    # The product is below `places`; float32 never rounds it up to `places`.
    return (uniforms[:, CROP_ROW : CROP_COLUMN + 1] * places.to(torch.float32)).to(torch.int64) * step


def windows(uniforms: NDArray[np.float32], sizes: NDArray[np.int64], crop: int, scale: int) -> list[Box]:
    """Return each sample's window, computed on the host."""
    places = corners(torch.from_numpy(uniforms), torch.from_numpy(sizes), crop, scale)
    return [Box(top, left, crop, crop) for top, left in places.tolist()]


def cropped(spec: DataSpec, crop: int) -> DataSpec:
    """Return the data spec with the size of the crops, or unchanged if there is no crop."""
    return dataclasses.replace(spec, height=crop, width=crop) if crop else spec


def check_crop(sizes: NDArray[np.int64], crop: int, scale: int, name_of: Callable[[int], str]) -> None:
    """Raise UserError if the crop is larger than an image, or if there is no crop and sizes differ."""
    smallest = int(sizes.min())
    wrong = np.flatnonzero(((sizes < crop) if crop else (sizes != sizes[0])).any(axis=1))[:MAX_NAMED].tolist()
    listed = ", ".join(f"{name_of(i)} {sizes[i][1]}×{sizes[i][0]}" for i in (wrong if crop else [0, *wrong[:1]]))
    if not crop and wrong:
        raise UserError(
            f"--crop 0: images of different sizes ({listed}) cannot share a batch; "
            f"set --crop to a size that fits every image, at most {smallest}"
        )
    if crop and scale and crop % scale:
        raise UserError(f"--crop {crop}: must be a multiple of {scale}, the scale of the low-resolution files")
    if wrong:
        raise UserError(
            f"--crop {crop}: larger than some images: {listed}; leave these out with --bad-images skip, "
            f"or use a crop of at most {smallest - smallest % max(1, scale)}"
        )


TORCH_TYPES = {"uint8": torch.uint8, "uint16": torch.uint16, "float32": torch.float32}  # by pixel type
SHIFT = 32768  # subtracted from 16-bit pixels
IMAGE_TYPES = (torch.uint8, torch.uint16, torch.int16, torch.float32)  # uint16 only until `stored` is called


def stored(images: Tensor) -> Tensor:
    """Return images with 16-bit pixels shifted to int16; other images are returned unchanged."""
    return (images.to(torch.int32) - SHIFT).to(torch.int16) if images.dtype == torch.uint16 else images


def to_unit_range(images: Tensor, pixels: PixelFormat, dtype: torch.dtype) -> Tensor:
    """Return stored images with values in [-1, 1].

    For integers, only the multiplication rounds, so the result is identical on all devices, fused or not.
    """
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    if images.is_floating_point():
        images = images.to(wide)
    # The subtraction also converts from integers, which saves a separate pass.
    return ((images - _middle(pixels, wide)) * (1 / pixels.half)).to(dtype)


def to_pixels(images: Tensor, pixels: PixelFormat) -> Tensor:
    """Convert images in [-1, 1] to pixels as in image files, rounded for integers."""
    levels = (images.float() + 1) * pixels.half
    levels = (levels.round_() if pixels.is_integer else levels).clamp_(0, pixels.span)
    return (levels + pixels.low if pixels.low else levels).to(TORCH_TYPES[pixels.dtype])


def lowest(pixels: PixelFormat) -> float:
    """Return the stored value that becomes -1."""
    return pixels.low - SHIFT if pixels.dtype == "uint16" else pixels.low


@cache
def _middle(pixels: PixelFormat, dtype: torch.dtype) -> Tensor:
    """Return the stored value that becomes 0 as a tensor of the given dtype."""
    return torch.tensor(pixels.middle - (SHIFT if pixels.dtype == "uint16" else 0), dtype=dtype)


def are_images(tensor: torch.Tensor) -> bool:
    """Return whether a field of a raw batch contains images rather than numbers."""
    return tensor.dtype in IMAGE_TYPES and tensor.ndim == 4


def upload(batch: Batch, device: torch.device) -> Batch:
    """Copy a batch to the device; copies to CUDA devices are asynchronous."""
    if device.type != "cuda":
        return {name: tensor.to(device) for name, tensor in batch.items()}
    return {name: tensor.pin_memory().to(device, non_blocking=True) for name, tensor in batch.items()}


def channels_first(batch: Batch) -> Batch:
    """View images [n, h, w, c] as [n, c, h, w] without copying; their memory format is torch's channels_last."""
    return {name: field.permute(0, 3, 1, 2) if are_images(field) else field for name, field in batch.items()}


BLOCK_ROWS = 500  # rows generated at a time outside training
MAKERS = {"normal": torch.randn, "uniform": torch.rand}


def number_from(*words: object) -> int:
    """Return a seed derived from the arguments. It is the same in every process."""
    return int.from_bytes(blake2b(repr(words).encode(), digest_size=8).digest(), "big") >> 1


class Drawer:
    """Generates the random inputs that a recipe declares in `draws`."""

    def __init__(self, draws: Mapping[str, Draw], seed: int, device: torch.device, dtype: torch.dtype) -> None:
        self.draws, self.seed, self.dtype = draws, seed, dtype
        self.generator = torch.Generator(device)

    def table(self, images: int, rows: int) -> dict[str, Tensor]:
        """Return all random inputs for a global batch of `rows` samples that starts after `images` images."""
        return {name: self._fill(name, draw, images, rows) for name, draw in self.draws.items()}

    def rows(self, purpose: str, start: int, stop: int) -> dict[str, Tensor]:
        """Return rows [start, stop) of the random inputs for `purpose`. They are the same on every device."""
        return {name: self._slice(name, draw, purpose, start, stop) for name, draw in self.draws.items()}

    def _slice(self, name: str, draw: Draw, purpose: str, start: int, stop: int) -> Tensor:
        if draw.common:
            drawn = self._block(name, draw, purpose, "common", 1).expand(stop - start, *draw.shape)
        else:
            first = start // BLOCK_ROWS
            blocks = range(first, -(-stop // BLOCK_ROWS))
            table = torch.cat([self._block(name, draw, purpose, block, BLOCK_ROWS) for block in blocks])
            drawn = table[start - first * BLOCK_ROWS : stop - first * BLOCK_ROWS]
        return upload({name: drawn.to(self.dtype).contiguous()}, self.generator.device)[name]

    def _block(self, name: str, draw: Draw, purpose: str, block: int | str, rows: int) -> Tensor:
        generator = torch.Generator().manual_seed(number_from(self.seed, purpose, block, name))
        return MAKERS[draw.kind]((rows, *draw.shape), generator=generator)

    def _fill(self, name: str, draw: Draw, images: int, rows: int) -> Tensor:
        self.generator.manual_seed(number_from(self.seed, images, name))
        # Always drawn in float32, so that the values do not depend on the run's precision.
        shape = (1 if draw.common else rows, *draw.shape)
        drawn = MAKERS[draw.kind](shape, generator=self.generator, device=self.generator.device)
        return drawn.to(self.dtype).expand(rows, *draw.shape).contiguous()


RGB = 3  # number of channels of a colour image


@dataclass(frozen=True)
class Augment:
    """Random augmentation for training; all images of a sample are changed in the same way."""

    pad_crop: int = 0  # black pixels added on each side before cropping to the original size
    flip: bool = False  # whether to flip each image left to right with probability 1/2
    cutout: int = 0  # side of the blanked square in pixels; 0 for no square
    rot90: bool = False  # whether to rotate each image by a random number of quarter turns
    swap_colours: bool = False  # whether to put the three channels of each image in random order

    @classmethod
    def from_settings(cls, settings: RunSettings, spec: DataSpec) -> Augment:
        """Return the augmentation for the settings; flip="auto" flips only if the data spec allows it."""
        flip = spec.flip_allowed if settings.flip == "auto" else settings.flip == "on"
        rot90 = settings.rot90 == "on"
        if rot90 and spec.height != spec.width:
            raise UserError(
                f"rot90=on: needs square images, not {spec.width}×{spec.height}; use --crop to get square images"
            )
        if settings.pad_crop and (settings.crop or spec.scale):
            raise UserError(
                f"pad_crop={settings.pad_crop}: not supported with --crop or low-resolution files; use --set pad_crop=0"
            )
        swap_colours = settings.swap_colours == "on"
        if swap_colours and spec.channels != RGB:
            raise UserError(f"swap_colours=on: needs images with three channels, not {spec.channels}")
        return cls(settings.pad_crop, flip, settings.cutout, rot90, swap_colours)


def transform(raw: Batch, augment: Augment | None, dtype: torch.dtype, pixels: PixelFormat = EIGHT_BITS) -> Batch:
    """Augment the images of a raw batch, scale their pixels to -1…1, and drop the random numbers."""
    batch = {name: tensor for name, tensor in raw.items() if name != "uniforms"}
    for name, tensor in batch.items():
        if are_images(tensor):
            batch[name] = _transform_images(stored(tensor), raw["uniforms"], augment or Augment(), pixels, dtype)
    return batch


def _transform_images(
    images: Tensor, uniforms: Tensor, augment: Augment, pixels: PixelFormat, dtype: torch.dtype
) -> Tensor:
    if augment.pad_crop or augment.flip:
        images = _crop_and_flip(images, uniforms, augment, lowest(pixels))
    if augment.rot90:
        images = _rot90(images, uniforms)
    if augment.swap_colours:
        images = _swap_colours(images, uniforms)
    scaled = to_unit_range(images, pixels, dtype)
    if augment.cutout:
        scaled.masked_fill_(_cutout_mask(scaled, uniforms, augment.cutout), 0.0)  # in place, to keep the memory format
    return scaled


def _crop_and_flip(images: Tensor, uniforms: Tensor, augment: Augment, black: float) -> Tensor:
    """Crop and flip with one gather, which reads each output pixel from its place in the padded image."""
    num, channels, height, width = images.shape
    pad = augment.pad_crop
    sample, row, column, flipped = _grid(num, height, width, images.device)
    images = images.permute(0, 2, 3, 1)
    if augment.flip:
        column = torch.where(uniforms[:, FLIP, None, None] < 0.5, flipped, column)
    if pad:
        framed, inside = _frame((num, height, width, channels), pad, images.dtype, black, images.device)
        inside.copy_(images)
        images = framed
        top, left = _pick(uniforms[:, CROP_ROW : CROP_COLUMN + 1, None, None], 2 * pad + 1).unbind(1)
        row, column = row + top, column + left
    return images[sample, row, column].permute(0, 3, 1, 2)


def _rot90(images: Tensor, uniforms: Tensor) -> Tensor:
    """Rotate each square image anticlockwise by a random number of quarter turns, with one gather."""
    num, _, side, _ = images.shape
    sample, row, column, _ = _grid(num, side, side, images.device)
    quarters = _pick(uniforms[:, ROT90], 4)[:, None, None]
    sideways = quarters % 2 == 1
    from_row, from_column = torch.where(sideways, column, row), torch.where(sideways, row, column)
    from_row = torch.where(quarters >= 2, side - 1 - from_row, from_row)
    from_column = torch.where((quarters == 1) | (quarters == 2), side - 1 - from_column, from_column)
    return images.permute(0, 2, 3, 1)[sample, from_row, from_column].permute(0, 3, 1, 2)


def _swap_colours(images: Tensor, uniforms: Tensor) -> Tensor:
    """Reorder the channels of each image; all six orders are equally likely."""
    orders = _colour_orders(images.device)
    order = orders[_pick(uniforms[:, COLOURS], len(orders))][:, None, None]
    pixels = images.permute(0, 2, 3, 1)
    return pixels.gather(3, order.expand(pixels.shape)).permute(0, 3, 1, 2)


# Cached for the life of the process: kernel launches take time, and a CUDA graph keeps using these tensors.
@cache
def _grid(num: int, height: int, width: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the indices of samples, rows, columns and reversed columns, each along its own dimension."""
    columns = torch.arange(width, device=device)[None, None]
    return (
        torch.arange(num, device=device)[:, None, None],
        torch.arange(height, device=device)[None, :, None],
        columns,
        width - 1 - columns,
    )


@cache
def _colour_orders(device: torch.device) -> Tensor:
    return torch.tensor(list(permutations(range(RGB))), device=device)


@cache
def _frame(
    shape: tuple[int, int, int, int], pad: int, dtype: torch.dtype, black: float, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return black images [n, h, w, c] padded by `pad` on each side, and a view of the area inside the padding."""
    num, height, width, channels = shape
    framed = torch.full((num, height + 2 * pad, width + 2 * pad, channels), black, dtype=dtype, device=device)
    return framed, framed[:, pad : pad + height, pad : pad + width]


def to_eight_bits(images: Tensor) -> Tensor:
    """Convert images in [-1, 1] to uint8, the format in which sample images are saved."""
    return to_pixels(images, EIGHT_BITS)


def _cutout_mask(images: Tensor, uniforms: Tensor, side: int) -> Tensor:
    """Return a mask with one square per image, centred anywhere in the image and clipped at the borders."""
    _, _, height, width = images.shape
    top = _pick(uniforms[:, CUTOUT_ROW], height)[:, None] - side // 2
    left = _pick(uniforms[:, CUTOUT_COLUMN], width)[:, None] - side // 2
    row, column = torch.arange(height, device=top.device), torch.arange(width, device=top.device)
    in_rows, in_columns = (row >= top) & (row < top + side), (column >= left) & (column < left + side)
    return (in_rows[:, :, None] & in_columns[:, None, :])[:, None]


def _pick(uniform: Tensor, count: int) -> Tensor:
    """Map a number u in [0, 1) to an integer below `count`: floor(u · count), which never rounds up to `count`."""
    return (uniform * count).to(torch.int64)
