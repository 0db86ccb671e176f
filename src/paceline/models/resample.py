"""Bicubic resampling on the device: antialiased where it shrinks, with the kernel of Pillow and MATLAB (a = -0.5).

`bicubic` is the plain filter. `bicubic_as_saved` rounds to eight bits after each of its two passes, as Pillow
does, so that a picture made on the device is the one that a file would hold: within 1/255, also at hard edges.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

HALF_MISSED_BY = 1e-4


def bicubic(pictures: Tensor, height: int, width: int) -> Tensor:
    """Pictures [n, c, h, w] at another size, in float32 or wider; values may overshoot the range."""
    with torch.autocast(pictures.device.type, enabled=False):
        wide = pictures.to(torch.promote_types(pictures.dtype, torch.float32))
        return F.interpolate(wide, (height, width), mode="bicubic", align_corners=False, antialias=True)


def bicubic_as_saved(pictures: Tensor, height: int, width: int) -> Tensor:
    """Pictures in -1…1 at another size, each pixel one that eight bits can hold."""
    levels = ((pictures + 1) * 127.5).round()
    for size in ((pictures.shape[-2], width), (height, width)):
        # Halves go up, as in Pillow; a little more decides for sums that miss a half by their rounding.
        levels = (bicubic(levels, *size) + (0.5 + HALF_MISSED_BY)).floor().clamp(0, 255)
    return levels / 127.5 - 1


def cut_to_multiple(pictures: Tensor, multiple: int) -> Tensor:
    """Pictures without the last rows and columns that a multiple leaves over."""
    height, width = (side - side % multiple for side in pictures.shape[-2:])
    return pictures[..., :height, :width]
