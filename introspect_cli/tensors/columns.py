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
from introspect_cli.tensors.arena import ROWS
from introspect_cli.tensors.row_notes import NOTHING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from introspect_cli.tensors.arena import Arena
    from introspect_cli.tensors.row_notes import Facts

COMPILED: Final = (
    *("nans", "posinfs", "neginfs", "zeros", "min", "max", "absmin", "mean", "amean", "var", "skew", "kurt"),
)
"""Statistics that the compiled kernels know, in their order: after the checksum, before the sketch."""


@dataclass(frozen=True)
class Columns:
    """What follows from rows, in their order; see `table.SummaryTable` for what stands where nothing counts."""

    checksum: npt.NDArray[np.uint64]
    statistics: dict[str, npt.NDArray[Any]]
    sketch: npt.NDArray[np.float32] | None


def of_rows(rows: r.Rows, facts: Facts, names: Sequence[str], *, with_sketch: bool) -> Columns:
    """The columns of rows, by numpy.

    Args:
        rows: shape (n, 32).
        facts: what is known of them beside.
        names: statistics that are wanted.
        with_sketch: whether sketches are.
    """
    seen = facts.seen
    sums, found = checksum.finalise(rows[:, r.RAW], facts.headers), statistics.finalise(rows, names)
    sketches = sketch.finalise(rows) if with_sketch else None
    sums[seen == NOTHING] = 0
    absent = np.flatnonzero(seen)  # few, as a rule
    for column in found.values():
        column[absent] = -1 if column.dtype.kind == "i" else np.nan
    if sketches is not None:
        sketches[absent] = np.nan
    return Columns(sums, found, sketches)


def of_blocks(arena: Arena, facts: Facts, names: Sequence[str], *, with_sketch: bool) -> Columns | None:
    """The same of the first rows of an arena; None where numpy has to compute it."""
    if kernels.KERNELS is None or not set(names).issubset(COMPILED):
        return None
    count = len(facts.headers)
    # Few arrays, and the columns are rows of them: asking one for its address takes longer than filling a column.
    sums = np.empty(count, np.uint64)
    sketches = np.empty((count, SKETCH_SIZE), np.float32) if with_sketch else None
    found: dict[str, npt.NDArray[Any]] = {}
    addresses: dict[str, int] = {}
    for kind, own in _by_type(names).items():
        array = np.empty((len(own), count), kind)
        base, step = array.ctypes.data, array.strides[0]
        for place, name in enumerate(own):
            found[name], addresses[name] = array[place], base + place * step
    last = 0 if sketches is None else sketches.ctypes.data
    targets = np.array([sums.ctypes.data, *(addresses.get(name, 0) for name in COMPILED), last], np.uint64)
    of, how = facts.headers.ctypes.data, facts.seen.ctypes.data
    kernels.KERNELS.columns(arena.place, ROWS, 0, of, how, count, targets.ctypes.data)
    return Columns(sums, {name: found[name] for name in names}, sketches)


def _by_type(names: Sequence[str]) -> dict[str, list[str]]:
    """Statistics by the type of their columns."""
    found: dict[str, list[str]] = {}
    for name in names:
        found.setdefault(STATISTICS[name].type, []).append(name)
    return found
