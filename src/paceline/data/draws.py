"""A recipe's random numbers, as functions of the seed and of the images seen.

They are drawn for the global batch and sliced, so ranks hold different rows of one table that does not
depend on how many ranks there are.
"""

from __future__ import annotations

from hashlib import blake2b

import torch
from torch import Tensor

from paceline.contracts.recipe import Draw

BLOCK_ROWS = 500  # of the tables that are drawn outside of training
_MAKERS = {"normal": torch.randn, "uniform": torch.rand}


def number_from(*words: object) -> int:
    """A seed that follows from words, the same in every process."""
    return int.from_bytes(blake2b(repr(words).encode(), digest_size=8).digest(), "big") >> 1


class Drawer:
    """Fills a recipe's draws."""

    def __init__(self, draws: dict[str, Draw], seed: int, device: torch.device, dtype: torch.dtype) -> None:
        self.draws, self.seed, self.dtype = draws, seed, dtype
        self.generator = torch.Generator(device)

    def table(self, images: int, rows: int) -> dict[str, Tensor]:
        """Every draw for the `rows` samples of the global batch that starts after so many images."""
        return {name: self._fill(name, draw, images, rows) for name, draw in self.draws.items()}

    def rows(self, purpose: str, start: int, stop: int) -> dict[str, Tensor]:
        """Rows [start, stop) of the endless table of a purpose outside of training; the same on every device."""
        return {name: self._slice(name, draw, purpose, start, stop) for name, draw in self.draws.items()}

    def _slice(self, name: str, draw: Draw, purpose: str, start: int, stop: int) -> Tensor:
        if draw.common:
            drawn = self._block(name, draw, purpose, "common", 1).expand(stop - start, *draw.shape)
        else:
            first = start // BLOCK_ROWS
            blocks = range(first, -(-stop // BLOCK_ROWS))
            table = torch.cat([self._block(name, draw, purpose, block, BLOCK_ROWS) for block in blocks])
            drawn = table[start - first * BLOCK_ROWS : stop - first * BLOCK_ROWS]
        return drawn.to(self.generator.device, self.dtype).contiguous()

    def _block(self, name: str, draw: Draw, purpose: str, block: int | str, rows: int) -> Tensor:
        generator = torch.Generator().manual_seed(number_from(self.seed, purpose, block, name))
        return _MAKERS[draw.kind]((rows, *draw.shape), generator=generator)

    def _fill(self, name: str, draw: Draw, images: int, rows: int) -> Tensor:
        self.generator.manual_seed(number_from(self.seed, images, name))
        make = _MAKERS[draw.kind]
        # Always drawn in float32: the numbers do not depend on the precision of the run.
        drawn = make((1 if draw.common else rows, *draw.shape), generator=self.generator, device=self.generator.device)
        return drawn.to(self.dtype).expand(rows, *draw.shape).contiguous()
