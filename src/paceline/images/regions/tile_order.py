"""The order of a pyramid's tiles in its file.

The tiles of the full resolution come block by block. A tile of a lower level follows the block that completes the tiles
from which it is computed, so that all levels grow together.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class Place(NamedTuple):
    """The place of a tile in a pyramid."""

    level: int
    row: int
    column: int


class TileOrder:
    """The position of each tile in the file, and the tiles that follow each block."""

    def __init__(self, grids: Sequence[tuple[int, int]], blocks: Iterable[tuple[slice, slice]]) -> None:
        """Order the tiles of levels with these numbers of rows and columns; blocks are rows and columns of tiles."""
        self.numbers = [np.full(grid, -1, np.int64) for grid in grids]
        self._missing = [np.zeros(grid, np.int8) for grid in grids]  # how many tiles each tile still needs
        for above, missing in zip(grids, self._missing[1:], strict=False):
            rows, columns = np.indices(above).reshape(2, -1)
            np.add.at(missing, (rows // 2, columns // 2), 1)
        self.num_tiles = 0
        starts, ends = [], []
        self._following: list[list[list[Place]]] = []
        for rows_of_block, columns_of_block in blocks:
            starts.append(self.num_tiles)
            fresh = np.mgrid[rows_of_block, columns_of_block].reshape(2, -1)
            self._append(0, fresh)
            ends.append(self.num_tiles)
            self._following.append(self._completed_by(fresh))
        self._starts, self._ends = np.array(starts), np.array(ends)

    @property
    def starts(self) -> list[int]:
        """The number of each block's first tile."""
        return [int(start) for start in self._starts]

    def num_blocks(self, num_tiles: int) -> int:
        """Return how many blocks are complete in a file with this number of tiles."""
        return int(np.searchsorted(self._ends, num_tiles, side="right"))

    def following(self, block: int) -> list[list[Place]]:
        """Return the tiles of the lower levels that follow a block, by level."""
        return self._following[block]

    def number(self, place: Place) -> int:
        """Return the position of a tile."""
        return int(self.numbers[place.level][place.row, place.column])

    def _completed_by(self, fresh: NDArray[np.int64]) -> list[list[Place]]:
        """Return the tiles of the lower levels that new tiles complete."""
        found = []
        for level in range(1, len(self.numbers)):
            needed_by = fresh // 2
            np.subtract.at(self._missing[level], tuple(needed_by), 1)
            needed_by = np.unique(needed_by, axis=1)
            fresh = needed_by[:, self._missing[level][tuple(needed_by)] == 0]
            self._append(level, fresh)
            found.append([Place(level, int(row), int(column)) for row, column in fresh.T])
        return found

    def _append(self, level: int, places: NDArray[np.int64]) -> None:
        count = places.shape[1]
        self.numbers[level][tuple(places)] = np.arange(self.num_tiles, self.num_tiles + count)
        self.num_tiles += count
