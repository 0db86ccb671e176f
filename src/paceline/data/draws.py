"""A recipe's random numbers, as functions of the seed and of the images seen.

They are drawn for the global batch and sliced, so ranks hold different rows of one table that does not
depend on how many ranks there are.
"""

from __future__ import annotations

from hashlib import blake2b

import torch
from torch import Tensor

from paceline.recipe import Draw


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

    def _fill(self, name: str, draw: Draw, images: int, rows: int) -> Tensor:
        self.generator.manual_seed(number_from(self.seed, images, name))
        make = {"normal": torch.randn, "uniform": torch.rand}[draw.kind]
        # Always drawn in float32: the numbers do not depend on the precision of the run.
        drawn = make((1 if draw.common else rows, *draw.shape), generator=self.generator, device=self.generator.device)
        return drawn.to(self.dtype).expand(rows, *draw.shape).contiguous()
