"""A recipe's random inputs, computed from the seed and the number of images seen.

They are generated for the entire global batch, and each rank takes its own rows. So they do not depend on the number
of ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import blake2b

import torch
from torch import Tensor

from paceline.contracts.recipe import Draw
from paceline.data.transfer import upload

BLOCK_ROWS = 500  # rows generated at a time outside training
_MAKERS = {"normal": torch.randn, "uniform": torch.rand}


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
        return _MAKERS[draw.kind]((rows, *draw.shape), generator=generator)

    def _fill(self, name: str, draw: Draw, images: int, rows: int) -> Tensor:
        self.generator.manual_seed(number_from(self.seed, images, name))
        make = _MAKERS[draw.kind]
        # Always drawn in float32, so that the values do not depend on the run's precision.
        drawn = make((1 if draw.common else rows, *draw.shape), generator=self.generator, device=self.generator.device)
        return drawn.to(self.dtype).expand(rows, *draw.shape).contiguous()
