"""A step's rows as columns: checksums, statistics, sketches.

numpy computes a column after the other, each in several passes; that is half a millisecond a step whatever there is to
compute, since nothing of it is in the processor's caches after a training step. So one call of the compiled kernels
does it where there are no other statistics than it knows. Both give the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from introspect_cli.records import SKETCH_SIZE, STATISTICS
from introspect_cli.tensors import checksum, kernels, sketch, statistics
from introspect_cli.tensors import rows as r

if TYPE_CHECKING:
    from collections.abc import Sequence

_COMPILED: Final = (
    *("nans", "posinfs", "neginfs", "zeros", "min", "max", "absmin", "mean", "amean", "var", "skew", "kurt"),
)
"""Statistics that the compiled kernels know, in their order: after the checksum, before the sketch."""


@dataclass(frozen=True)
class Columns:
    """What follows from rows, as if all of them held values; see `table.SummaryTable`."""

    checksum: npt.NDArray[np.uint64]
    statistics: dict[str, npt.NDArray[Any]]
    sketch: npt.NDArray[np.float32] | None


def of_rows(rows: r.Rows, headers: npt.NDArray[np.uint64], names: Sequence[str], *, with_sketch: bool) -> Columns:
    """The columns of rows, by numpy.

    Args:
        rows: shape (n, 32).
        headers: checksum header of each row.
        names: statistics that are wanted.
        with_sketch: whether sketches are.
    """
    sums = checksum.finalise(rows[:, r.RAW], headers)
    return Columns(sums, statistics.finalise(rows, names), sketch.finalise(rows) if with_sketch else None)


def of_blocks(
    blocks: Sequence[r.Rows], headers: npt.NDArray[np.uint64], names: Sequence[str], *, with_sketch: bool
) -> Columns | None:
    """The same of the first rows of blocks, as many as there are headers; None where numpy has to compute it."""
    if kernels.KERNELS is None or not set(names).issubset(_COMPILED):
        return None
    count = len(headers)
    sums = np.empty(count, np.uint64)
    found = {name: np.empty(count, STATISTICS[name].type) for name in names}
    sketches = np.empty((count, SKETCH_SIZE), np.float32) if with_sketch else None
    columns = (sums, *map(found.get, _COMPILED), sketches)
    targets = np.array([0 if column is None else column.ctypes.data for column in columns], np.uint64)
    first = 0
    for block in blocks:
        some = min(len(block), count - first)
        if some <= 0:
            break
        own = (block.ctypes.data, headers.ctypes.data + 8 * first, some, first)
        kernels.KERNELS.columns(*own, targets.ctypes.data)
        first += some
    return Columns(sums, found, sketches)
