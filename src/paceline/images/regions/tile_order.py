"""The order of a pyramid's tiles in its file.

The tiles at full resolution are written block by block. A lower-resolution tile is computed from up to four
tiles of the level before it. It is written after the block that completes them, so that all levels grow together.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class Place(NamedTuple):
    """The level, row and column of a tile in a pyramid."""

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
        self.starts: list[int] = []  # the number of each block's first tile
        self._ends: list[int] = []  # the number after each block's last tile
        self._following: list[list[list[Place]]] = []
        for rows_of_block, columns_of_block in blocks:
            self.starts.append(self.num_tiles)
            fresh = np.mgrid[rows_of_block, columns_of_block].reshape(2, -1)
            self._append(0, fresh)
            self._ends.append(self.num_tiles)
            self._following.append(self._completed_by(fresh))

    def num_blocks(self, num_tiles: int) -> int:
        """Return the number of complete blocks in a file that has this number of tiles so far."""
        return bisect_right(self._ends, num_tiles)

    def following(self, block: int) -> list[list[Place]]:
        """Return the lower-resolution tiles that are written after a block, one list per level."""
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
