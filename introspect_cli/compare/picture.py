"""Where two tensors differ, as a grid small enough to look at.

A tensor is laid out as rows and columns, neighbouring elements share a cell, and a cell shows the largest difference in
it, so that a single element that differs is never lost.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

ROWS, COLUMNS = 48, 96
"""The most cells of a picture."""

_NARROW = 8


@dataclass(frozen=True)
class Picture:
    """A grid of cells.

    Attributes:
        rows: what the rows are: the dimensions of the tensor that are counted through.
        columns: what the columns are.
        height: rows of the tensor before folding.
        width: columns of the tensor before folding.
        cells: a row of cells each; a cell is 0.0 where all is equal, the largest |a - b| in it otherwise, infinite
            where one of the two is not finite.
    """

    rows: tuple[int, ...]
    columns: tuple[int, ...]
    height: int
    width: int
    cells: tuple[tuple[float, ...], ...]

    @property
    def tile(self) -> tuple[int, int]:
        """Rows and columns of the tensor in a cell."""
        return -(-self.height // max(len(self.cells), 1)), -(-self.width // max(len(self.cells[0]), 1))


def picture_of(apart: NDArray[np.float64], mask: NDArray[Any], most: tuple[int, int] = (ROWS, COLUMNS)) -> Picture:
    """The grid of two tensors that differ by `apart` where `mask` is true."""
    split = _split(apart.shape)
    height, width = math.prod(apart.shape[:split]), math.prod(apart.shape[split:])
    above = apart[mask & (apart > 0)]
    least = float(above.min()) if len(above) else 1.0  # what a sign of zero, which differs by nothing, is shown as
    shown = np.where(mask, np.maximum(apart, least), 0.0)
    grid = shown.reshape(max(height, 1), max(width, 1)) if shown.size else np.zeros((1, 1))
    return Picture(
        rows=tuple(range(split)),
        columns=tuple(range(split, apart.ndim)),
        height=grid.shape[0],
        width=grid.shape[1],
        cells=folded(grid, most),
    )


def folded(grid: NDArray[np.float64], most: tuple[int, int]) -> tuple[tuple[float, ...], ...]:
    """A grid with at most so many rows and columns, each cell the largest of what it covers."""
    for axis, room in enumerate(most):
        tile = tile_of(grid.shape[axis], room)
        if tile > 1:
            grid = np.maximum.reduceat(grid, np.arange(0, grid.shape[axis], tile), axis=axis)
    return tuple(tuple(map(float, row)) for row in grid)


def tile_of(size: int, room: int) -> int:
    """How many share a cell: as many as divide them evenly, where such are near, so that cells end with dimensions."""
    least = -(-size // room)
    return next((tile for tile in range(least, 2 * least) if size % tile == 0), least)


def _split(shape: tuple[int, ...]) -> int:
    """How many leading dimensions are the rows: all but the last, or but two where the last is narrow."""
    if len(shape) < 2:
        return 0
    if len(shape) > 2 and shape[-1] < _NARROW:
        return len(shape) - 2
    return len(shape) - 1
