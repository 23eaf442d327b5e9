"""One step of all ranks as columns end to end, and what their layouts say as tables.

Each rank numbers its sites, layouts and parts by itself. Here numbers mean the same on every rank, so that arrays
can be compared where objects would have to be.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from introspect_cli.store.columns import filled
from introspect_cli.sums import header

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from introspect_cli.records import Layout, Part
    from introspect_cli.store.batch import StepBatch
    from introspect_cli.store.rank_reader import RankReader

    Array = NDArray[Any]


def whole_layout(layout: Layout) -> Layout:
    """The layout of a whole, given that of a part."""
    return layout if layout.part is None else replace(layout, part=None)


class Places:
    """What the layouts of all ranks say, as tables by a number that means the same on each.

    Attributes:
        layouts: every layout that any rank has.
        numbers: for each reader, the number of each of its layouts.
        part: int64, a number for each different part, from 1; 0 where a rank holds all of it.
        held: int64, elements that the rank holds.
        shape: int64, a number for each different shape of a whole.
        owed: bool, whether it is a sum (or mean) that is still owed.
        header: uint64, what a whole's checksum has beside its elements.
    """

    def __init__(self, readers: Sequence[RankReader]) -> None:
        """Take the readers' layouts."""
        known: dict[Layout, int] = {}
        self.numbers = [
            np.array([known.setdefault(layout, len(known)) for layout in reader.layouts], np.int64)
            for reader in readers
        ]
        self.layouts = list(known)
        parts: dict[Part, int] = {}
        shapes: dict[tuple[int, ...], int] = {}
        self.part = np.zeros(len(known), np.int64)
        self.held, self.shape = np.zeros(len(known), np.int64), np.zeros(len(known), np.int64)
        self.owed, self.header = np.zeros(len(known), np.bool_), np.zeros(len(known), np.uint64)
        for number, layout in enumerate(self.layouts):
            part = layout.part
            self.shape[number] = shapes.setdefault(layout.shape, len(shapes))
            self.held[number] = min(layout.numel if part is None else part.numel, (1 << 62) - 1)
            self.header[number] = header(layout.dtype, layout.shape)
            if part is not None:
                self.part[number] = parts.setdefault(part, len(parts) + 1)
                self.owed[number] = bool(part.owed)


class RankedStep:
    """One step of all ranks, their columns end to end.

    Attributes:
        site: int64 (n,), numbers of the whole.
        rank: int64 (n,), positions of ranks.
        number: int64 (n,), numbers of layouts, as `Places` has them.
    """

    def __init__(
        self, batches: list[StepBatch], ranks: Sequence[int], numbers: Sequence[Array], places: Sequence[Array]
    ) -> None:
        """Take a batch of each rank, and the whole's numbers of their sites and layouts."""
        self._batches, self._ranks = batches, list(ranks)
        sizes = [len(batch) for batch in batches]
        self._starts = np.concatenate([[0], np.cumsum(sizes)])
        self.rank = np.repeat(np.arange(len(batches)), sizes)
        self.site = np.concatenate([own[np.asarray(b.site)] for own, b in zip(numbers, batches, strict=True)])
        self.number = np.concatenate([own[np.asarray(b.layout)] for own, b in zip(places, batches, strict=True)])
        self.status = np.concatenate([np.asarray(batch.status) for batch in batches])
        self.checksum = np.concatenate([np.asarray(batch.checksum, np.uint64) for batch in batches])

    @cached_property
    def order(self) -> Array:
        """float64 (n,), where in the step."""
        return np.concatenate([np.asarray(batch.sequence, np.float64) for batch in self._batches])

    @cached_property
    def counts(self) -> dict[str, Array]:
        """Counts that all ranks kept."""
        every = [batch.counts for batch in self._batches]
        return {name: np.concatenate([own[name] for own in every]) for name in every[0] if _all_have(name, every)}

    @cached_property
    def floats(self) -> dict[str, Array]:
        """Other statistics that all ranks kept, float64."""
        every = [batch.floats for batch in self._batches]
        return {
            name: np.concatenate([np.asarray(own[name], np.float64) for own in every])
            for name in every[0]
            if _all_have(name, every)
        }

    @cached_property
    def sketch(self) -> Array | None:
        """float32 (n, 16), or None where a rank kept none."""
        every = [batch.sketch for batch in self._batches]
        return None if any(own is None for own in every) else np.concatenate([np.asarray(own) for own in every])

    @cached_property
    def texts(self) -> dict[int, str]:
        """The texts that are not empty, by row."""
        found: dict[int, str] = {}
        for start, batch in zip(self._starts.tolist(), self._batches, strict=False):
            found |= {start + row: batch.text[row] for row in filled(batch.text).tolist()}
        return found

    def rank_of(self, row: int) -> int:
        """The rank that recorded a row."""
        return self._ranks[int(self.rank[row])]


def _all_have(name: str, every: Sequence[dict[str, Array]]) -> bool:
    return all(name in own for own in every)
