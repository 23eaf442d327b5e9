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
    """The layout without its part."""
    return layout if layout.part is None else replace(layout, part=None)


def batched_layout(layouts: Sequence[Layout]) -> Layout:
    """The layout of tensors put end to end: dimension 0 summed, others the largest, dtypes joined by " and "."""
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
        numbers: for each reader, the number of each of its layouts.
        part: int64, a number for each different part, from 1; 0 where a rank holds all of it.
        local_numel: int64, elements that the rank holds.
        shape: int64, a number for each different shape of a whole.
        unplaced: bool, whether a rank holds some of it, and where is not known.
        owed: bool, whether it is a sum (or mean) that is still owed.
        header: uint64, what a whole's checksum has beside its elements.
    """

    def __init__(self, readers: Sequence[RankReader]) -> None:
        """Number the layouts of all readers, equal ones alike."""
        numbers_of: dict[Layout, int] = {}
        self.numbers = [
            np.array([numbers_of.setdefault(layout, len(numbers_of)) for layout in reader.layouts], np.int64)
            for reader in readers
        ]
        self.layouts = list(numbers_of)
        self.unplaced = np.array([layout.strides == UNPLACED for layout in self.layouts], np.bool_)
        parts: dict[Part, int] = {}
        shapes: dict[tuple[int, ...], int] = {}
        self.part = np.zeros(len(numbers_of), np.int64)
        self.local_numel, self.shape = np.zeros(len(numbers_of), np.int64), np.zeros(len(numbers_of), np.int64)
        self.owed, self.header = np.zeros(len(numbers_of), np.bool_), np.zeros(len(numbers_of), np.uint64)
        for number, layout in enumerate(self.layouts):
            part = layout.part
            self.shape[number] = shapes.setdefault(layout.shape, len(shapes))
            self.local_numel[number] = min(layout.numel if part is None else part.numel, (1 << 62) - 1)
            self.header[number] = header(layout.dtype, layout.shape)
            if part is not None:
                self.part[number] = parts.setdefault(part, len(parts) + 1)
                self.owed[number] = bool(part.owed)


class Rows:
    """Site, rank, layout and status of each row of a step of all ranks; shared by steps with the same rows.

    Attributes:
        site: int64 (n,), numbers of the whole.
        rank: int64 (n,), positions of ranks.
        number: int64 (n,), numbers of layouts, as `LayoutTables` has them.
        status: uint8 (n,).
    """

    def __init__(self, batches: Sequence[StepBatch], numbers: Sequence[Array], places: Sequence[Array]) -> None:
        """Stack a batch of each rank.

        Args:
            batches: of each rank.
            numbers: for each rank, the whole's number of each of its sites.
            places: for each rank, the common number of each of its layouts.
        """
        sizes = [len(batch) for batch in batches]
        self._columns = [tuple(np.array(column) for column in _columns(batch)) for batch in batches]
        self.rank = np.repeat(np.arange(len(batches)), sizes)
        self.site = np.concatenate([each[np.asarray(b.site)] for each, b in zip(numbers, batches, strict=True)])
        self.number = np.concatenate([each[np.asarray(b.layout)] for each, b in zip(places, batches, strict=True)])
        self.status = np.concatenate([np.asarray(batch.status) for batch in batches])

    def are_of(self, batches: Sequence[StepBatch]) -> bool:
        """Whether each rank's batch has the same sites, layouts and statuses, in the same order."""
        return len(batches) == len(self._columns) and all(
            all(map(np.array_equal, columns, _columns(batch)))
            for columns, batch in zip(self._columns, batches, strict=True)
        )


def _columns(batch: StepBatch) -> tuple[Array, Array, Array]:
    return batch.site, batch.layout, batch.status


class StackedStep:
    """One step of all ranks as one block of records.

    Attributes:
        batches: of each rank.
        rows: which rows they have.
        block: all records, those of a rank after those of the one before.
    """

    def __init__(
        self,
        batches: list[StepBatch],
        ranks: Sequence[int],
        numbers: Sequence[Array],
        places: Sequence[Array],
        like: Rows | None = None,
    ) -> None:
        """Stack a batch of each rank.

        Args:
            batches: of each rank.
            ranks: their numbers.
            numbers: for each rank, the whole's number of each of its sites.
            places: for each rank, the common number of each of its layouts.
            like: rows of an earlier step, taken over where they are the same.
        """
        self.batches, self._ranks = batches, list(ranks)
        self.rows = like if like is not None and like.are_of(batches) else Rows(batches, numbers, places)
        self.block = rows_of(batches, [np.arange(len(batch)) for batch in batches])

    def rank_of(self, row: int) -> int:
        """The rank that recorded a row."""
        return self._ranks[int(self.rows.rank[row])]
