"""One step of all ranks as columns end to end, and what their layouts say as tables.

Each rank numbers its sites, layouts and parts by itself. Here numbers mean the same on every rank, so that arrays
can be compared where objects would have to be.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from introspect_cli.records import UNPLACED
from introspect_cli.store.format.batch import rows_of
from introspect_cli.sums import header

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from introspect_cli.records import Layout, Part
    from introspect_cli.store.format.batch import StepBatch
    from introspect_cli.store.read.rank_reader import RankReader

    Array = NDArray[Any]


def whole_layout(layout: Layout) -> Layout:
    """The layout without its part; itself where it has none."""
    return layout if layout.part is None else replace(layout, part=None)


def batched_layout(layouts: Sequence[Layout]) -> Layout:
    """The layout of tensors put end to end: dimension 0 summed, others the largest, dtypes joined by " and ".

    Device and strides are the first layout's, without a part; its shape, too, where it is 0-dimensional or another has
    another number of dimensions. Further layouts without dimensions are ignored for the shape.
    """
    shape = layouts[0].shape
    shapes = [layout.shape for layout in layouts if layout.shape]
    if shape and all(len(other) == len(shape) for other in shapes):
        widest = map(max, zip(*(other[1:] for other in shapes), strict=True))
        shape = (sum(other[0] for other in shapes), *widest)
    dtype = " and ".join(dict.fromkeys(layout.dtype for layout in layouts))  # a rank may compute in another
    return replace(whole_layout(layouts[0]), shape=shape, dtype=dtype)


class LayoutTables:
    """The layouts of all ranks under common numbers, with their properties as arrays.

    Attributes:
        layouts: every layout that any rank has.
        common_numbers: for each reader, the number of each of its layouts.
        part: int64, a number for each different part, from 1; 0 where a rank holds all of it.
        local_numel: int64, elements that the rank holds.
        shape: int64, a number for each different shape of a whole.
        unplaced: bool, whether a rank holds some of it, and where is not known.
        unreduced: bool, whether it is a sum (or mean) that the ranks have not reduced yet.
        header: uint64, `sums.header` of dtype and whole shape, which a checksum has beside its elements.
    """

    def __init__(self, readers: Sequence[RankReader]) -> None:
        """Number the layouts of all readers, equal ones alike."""
        numbers_of: dict[Layout, int] = {}
        self.common_numbers = [
            np.array([numbers_of.setdefault(layout, len(numbers_of)) for layout in reader.layouts], np.int64)
            for reader in readers
        ]
        self.layouts = list(numbers_of)
        parts: dict[Part | None, int] = {None: 0}
        shapes: dict[tuple[int, ...], int] = {}
        held = [(layout if layout.part is None else layout.part).numel for layout in self.layouts]
        self.part = np.array([parts.setdefault(layout.part, len(parts)) for layout in self.layouts], np.int64)
        self.local_numel = np.array([min(numel, (1 << 62) - 1) for numel in held], np.int64)
        self.shape = np.array([shapes.setdefault(layout.shape, len(shapes)) for layout in self.layouts], np.int64)
        self.unplaced = np.array([layout.strides == UNPLACED for layout in self.layouts], np.bool_)
        self.unreduced = np.array(
            [layout.part is not None and bool(layout.part.reduction) for layout in self.layouts], np.bool_
        )
        self.header = np.array([header(layout.dtype, layout.shape) for layout in self.layouts], np.uint64)


class Rows:
    """Site, rank, layout and status of each row of a step of all ranks; shared by steps with the same rows.

    Attributes:
        site: int64 (n,), common numbers.
        rank: int64 (n,), positions of ranks.
        layout: int64 (n,), common numbers.
        status: uint8 (n,).
    """

    def __init__(self, batches: Sequence[StepBatch], sites: Sequence[Array], layouts: Sequence[Array]) -> None:
        """Stack a batch of each rank.

        Args:
            batches: of each rank.
            sites: for each rank, the common number of each of its sites.
            layouts: for each rank, the common number of each of its layouts.
        """
        self._columns = [[np.array(column) for column in _identity(batch)] for batch in batches]
        self.rank = np.repeat(np.arange(len(batches)), [len(batch) for batch in batches])
        own = list(zip(*self._columns, strict=True))
        self.site = np.concatenate([common[each] for common, each in zip(sites, own[0], strict=True)])
        self.layout = np.concatenate([common[each] for common, each in zip(layouts, own[1], strict=True)])
        self.status = np.concatenate(own[2])

    def are_of(self, batches: Sequence[StepBatch]) -> bool:
        """Whether each rank's batch has the same sites, layouts and statuses, in the same order."""
        return len(batches) == len(self._columns) and all(
            all(map(np.array_equal, columns, _identity(batch)))
            for columns, batch in zip(self._columns, batches, strict=True)
        )


def _identity(batch: StepBatch) -> tuple[Array, Array, Array]:
    """The columns by which the rows of two steps are the same: site, layout, status."""
    return batch.site, batch.layout, batch.status


class StackedStep:
    """One step of all ranks as one block of records.

    Attributes:
        batches: of each rank.
        rows: which rows they have.
        block: all records, those of a rank after those of the one before.
    """

    def __init__(self, batches: list[StepBatch], ranks: Sequence[int], rows: Rows) -> None:
        """Copy the ranks' batches into one block.

        Args:
            batches: of each rank.
            ranks: their numbers.
            rows: the rows of these batches.
        """
        self.batches, self.rows = batches, rows
        self.block = rows_of(batches, [np.arange(len(batch)) for batch in batches])
        self._ranks = np.array(ranks, np.int64)

    def ranks_of(self, rows: Array) -> list[int]:
        """For each of some rows (positions in the block) the number of the rank that recorded it."""
        numbers: list[int] = self._ranks[self.rows.rank[rows]].tolist()
        return numbers
