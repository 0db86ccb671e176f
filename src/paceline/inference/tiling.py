"""Pictures of any size in tiles: each with a halo, so that together they are what the whole picture gives."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from paceline.data.memory import free_bytes
from paceline.images.decode import BadImage
from paceline.inference.image_model import ImageModel
from paceline.inference.receptive_field import ReceptiveField

SHARE_OF_FREE = 0.5  # of the memory that is free; others need some, too
HOST_BYTES = 2.2e9  # of the result and of a tile together, where the host computes
TILE_BYTES_ON_HOST = (0.5e9, 1.2e9)  # at least, whatever the result needs, and at most: more gains little speed
WORKSPACE = 1.5  # times the intermediate results: what convolutions need besides
INEXACT_HALO_PX = 64  # where no halo is exact, or the exact one does not fit
SMALLEST_TILE_PX = 32
LUMA = (0.299, 0.587, 0.114)  # of ITU-R 601, as Pillow computes grey

Paste = Callable[[str, int, int, np.ndarray], None]  # name, top, left, pixels in -1…1 [h, w, c]


@dataclass(frozen=True)
class Tiling:
    """How a picture is cut."""

    side_px: int  # of a tile, in the input, without its halo
    halo_px: int
    note: str = ""  # what a person should know about the result

    def halved(self, multiple: int) -> Tiling | None:
        """The same with smaller tiles; None where they are as small as can be."""
        side = self.side_px // 2 // multiple * multiple
        return replace(self, side_px=side) if side >= max(multiple, SMALLEST_TILE_PX // 2) else None

    def windows(self, length: int) -> list[tuple[int, int, int, int]]:
        """Along one side: where each tile begins and ends, and where it does with its halo."""
        found = []
        for begin in range(0, length, self.side_px):
            end = min(begin + self.side_px, length)
            found.append((begin, end, max(0, begin - self.halo_px), min(length, end + self.halo_px)))
        return found


def choose_tiling(
    field: ReceptiveField, size: tuple[int, int], device: torch.device, *, share: int = 1, side: int = 0, held: int = 0
) -> Tiling:
    """Tiles of the asked side, or as large as the memory allows that `share` processes have to share.

    `held` are the bytes that the result takes on the host.
    """
    free = free_bytes(device) * SHARE_OF_FREE / share
    usual = free
    if device.type == "cpu":
        least, most = TILE_BYTES_ON_HOST
        usual = min(free, max(least, min(most, HOST_BYTES - held)) / share)
    whole = math.ceil(max(size) / field.multiple_px) * field.multiple_px
    exact = not field.obstacles
    why = f"{field.obstacles[0]}: tiles may show" if field.obstacles else ""
    if side:
        tiling = Tiling(_rounded_up(side, field.multiple_px), _inexact_halo(field) if why else field.tiled_halo_px)
        return replace(tiling, note=why if tiling.side_px < max(size) else "")
    if _bytes(field, size[0] * size[1]) <= (usual if exact else free):
        return Tiling(whole, 0)
    for budget in (usual, free) if exact else ():
        fitting = _largest_side(field, budget, field.tiled_halo_px)
        if fitting >= max(field.multiple_px, SMALLEST_TILE_PX):
            return Tiling(fitting, field.tiled_halo_px)
    halo = _inexact_halo(field)
    fitting = max(_largest_side(field, free, halo), _rounded_up(SMALLEST_TILE_PX, field.multiple_px))
    note = why or f"its reach of {field.halo_px} pixels does not fit in memory with a tile: tiles may show"
    return Tiling(fitting, halo, note)


def restore_in_tiles(
    image_model: ImageModel, pixels: np.ndarray, tiling: Tiling, paste: Paste, done: Callable[[int], None]
) -> None:
    """Applies networks to a picture [h, w, c] of whole numbers, tile by tile; `done` gets each tile's pixels."""
    height, width = pixels.shape[:2]
    scale = image_model.output_scale
    for top, bottom, high, low in tiling.windows(height):
        for left, right, first, last in tiling.windows(width):
            rows = slice((top - high) * scale, (bottom - high) * scale)
            columns = slice((left - first) * scale, (right - first) * scale)
            for name, made in restored(image_model, in_range(pixels[high:low, first:last])).items():
                paste(name, top * scale, left * scale, made[rows, columns].cpu().numpy())
            done((bottom - top) * (right - left))


def in_range(pixels: np.ndarray) -> Tensor:
    """Whole numbers [h, w, c] of 8 or 16 bits as one picture in -1…1, [1, c, h, w]."""
    half = np.iinfo(pixels.dtype).max / 2
    return torch.from_numpy(pixels.astype(np.float32)).permute(2, 0, 1).unsqueeze(0) / half - 1


@torch.no_grad()
def restored(image_model: ImageModel, picture: Tensor) -> dict[str, Tensor]:
    """What networks make of one picture, by name, each [h, w, c].

    Where picture and networks differ in their channels, results of the same kind keep those of the picture: a grey one
    is shown in three channels and averaged again, and networks for grey pictures see one colour after the other. Other
    modalities have the channels of the networks, which see a colour picture's luma if they see one channel.
    """
    own, wanted = picture.shape[1], image_model.spec.channels
    same_kind = not image_model.spec.panels
    picture = picture.to(next(image_model.recipe.parameters()).device)
    if own < wanted:
        picture = picture.expand(-1, wanted, -1, -1)
    elif own > wanted:
        luma = picture.new_tensor(LUMA).view(1, 3, 1, 1)
        picture = picture.transpose(0, 1) if same_kind else (picture * luma).sum(1, keepdim=True)
    found = {}
    for name, made in image_model.recipe.image_to_image(picture).items():
        if not made.isfinite().all():
            raise BadImage("the networks make numbers of it that are not finite; the weights may be damaged")
        made = made.transpose(0, 1) if len(made) > 1 else made
        made = made.mean(1, keepdim=True) if own < made.shape[1] and same_kind else made
        found[name] = made[0].permute(1, 2, 0).float().clamp(-1, 1)
    return found


def _bytes(field: ReceptiveField, pixels: float) -> float:
    return pixels * field.bytes_per_px * WORKSPACE


def _largest_side(field: ReceptiveField, budget: float, halo: int) -> int:
    side = math.isqrt(int(budget / max(_bytes(field, 1), 1))) - 2 * halo
    return side // field.multiple_px * field.multiple_px


def _inexact_halo(field: ReceptiveField) -> int:
    return min(_rounded_up(INEXACT_HALO_PX, field.multiple_px), field.tiled_halo_px)


def _rounded_up(side: int, multiple: int) -> int:
    return math.ceil(side / multiple) * multiple
