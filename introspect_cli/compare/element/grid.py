"""Where two tensors differ, as a grid small enough to look at.

A tensor is laid out as rows and columns, neighbouring elements share a cell, and a cell shows the largest difference in
it, so that a single element that differs is never lost.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

ROWS, COLUMNS = 48, 96
"""The most cells of a picture."""

SIGN = 5e-324
"""What the sign of a zero, which differs by nothing, is shown as where nothing else differs."""

_NARROW = 8


@dataclass(frozen=True)
class Picture:
    """A grid of cells.

    Attributes:
        rows: what the rows are: the dimensions of the tensor that are counted through.
        columns: what the columns are.
        sizes: how many rows each of their dimensions makes, and how many columns.
        tile: rows and columns of the tensor in a cell; at the end of a dimension fewer may be left.
        cells: a row of cells each; a cell is 0.0 where all is equal, the largest |a - b| in it otherwise, infinite
            where one of the two is not finite.
    """

    rows: tuple[int, ...]
    columns: tuple[int, ...]
    sizes: tuple[tuple[int, ...], tuple[int, ...]]
    tile: tuple[int, int]
    cells: tuple[tuple[float, ...], ...]

    @property
    def is_even(self) -> bool:
        """Whether all cells have as many elements."""
        shape = len(self.cells), len(self.cells[0])
        return all(
            cells * tile == math.prod(sizes) for cells, tile, sizes in zip(shape, self.tile, self.sizes, strict=True)
        )


def picture_of(distances: NDArray[np.float64], mask: NDArray[Any], most: tuple[int, int] = (ROWS, COLUMNS)) -> Picture:
    """The grid of two tensors that differ by these distances where `mask` is true."""
    split = _split(distances.shape)
    above = distances[mask & (distances > 0)]
    least = float(above.min()) if len(above) else SIGN
    shown = np.where(mask, np.maximum(distances, least), 0.0)
    sizes = distances.shape[:split] or (1,), distances.shape[split:] or (1,)
    if not shown.size:
        shown, sizes = np.zeros(1), ((1,), (1,))
    grid = shown.reshape(math.prod(sizes[0]), math.prod(sizes[1]))
    whole = Picture(tuple(range(split)), tuple(range(split, distances.ndim)), sizes, (1, 1), _cells(grid))
    return smaller(whole, most, grid)


def smaller(picture: Picture, most: tuple[int, int], grid: NDArray[np.float64] | None = None) -> Picture:
    """The same with at most so many rows and columns, each cell the largest of what it covers."""
    grid = np.array(picture.cells) if grid is None else grid
    tiles = []
    for axis, room in enumerate(most):
        starts, tile = _fold(_cells_of(picture.sizes[axis], picture.tile[axis]), room)
        if len(starts) < grid.shape[axis]:
            grid = np.maximum.reduceat(grid, starts, axis=axis)
        tiles.append(_joined(picture.sizes[axis][-1], picture.tile[axis], tile))
    return replace(picture, tile=(tiles[0], tiles[1]), cells=_cells(grid))


def _joined(inner: int, tile: int, cells: int) -> int:
    """How many rows share a cell made of so many cells of `tile` rows; the last of a dimension may have less."""
    covered = tile * -(-inner // tile)
    return tile * cells // covered * inner if tile <= inner and tile * cells % covered == 0 else tile * cells


def _cells(grid: NDArray[np.float64]) -> tuple[tuple[float, ...], ...]:
    return tuple(tuple(map(float, row)) for row in grid)


def _cells_of(sizes: tuple[int, ...], tile: int) -> tuple[int, ...]:
    """How many cells each dimension has where so many of its elements share one, whole inner dimensions first."""
    counts, left = [], tile
    for size in reversed(sizes):
        cells = -(-size // left)
        counts.append(cells)
        left = max(left // size, 1) if cells == 1 else 1
    return tuple(reversed(counts))


def _fold(sizes: tuple[int, ...], room: int) -> tuple[NDArray[np.intp], int]:
    """Where the cells begin in what dimensions of such sizes make, and how many share one.

    No cell goes over the end of a dimension as long as there is room for it, so that samples and heads stay apart: the
    innermost dimension is folded into as many cells as each of the outer ones can have, and where that is less than
    one, it becomes one cell, and the next dimension is folded.
    """
    *outer, inner = sizes
    count = math.prod(outer)
    if count * inner <= room:
        return np.arange(count * inner), 1
    if count > room:
        starts, tile = _fold(tuple(outer), room)
        return starts * inner, tile * inner
    tile = tile_of(inner, room // count)
    return (np.arange(count)[:, None] * inner + np.arange(0, inner, tile)).ravel(), tile


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
