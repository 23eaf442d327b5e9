"""Which rows of which ranks are added to which sums.

That hardly changes from step to step. Most ranks have the same rows for the same sums, so their columns lie on one
another as they were read: nothing is sorted, and nothing is put end to end.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    Array = NDArray[Any]


@dataclass(frozen=True)
class Alike:
    """Ranks of which the same rows are added to the same sums.

    Attributes:
        ranks: positions of ranks.
        rows: n rows of each.
        to: the n sums that they are added to, each once.
        held: float64 (ranks, n), elements of each.
        heads: uint64 (ranks, n), what each checksum has beside its elements.
    """

    ranks: tuple[int, ...]
    rows: Array | slice
    to: Array | slice
    held: Array
    heads: Array

    def stacked(self, columns: Sequence[Array]) -> Array:
        """Their rows of a column that each rank has, (ranks, n)."""
        return np.stack([columns[rank][self.rows] for rank in self.ranks])


class Added(NamedTuple):
    """Sums.

    Attributes:
        checksum: uint64, of the whole whose parts are added up.
        sketch: float64 (sums, 16); None where a rank kept none.
        counts: int64 by name, -1 where a rank did not count.
        floats: float64 by name, NaN where absent; those that do not add up are left out.
    """

    checksum: Array
    sketch: Array | None
    counts: dict[str, Array]
    floats: dict[str, Array]


def alike_ranks(rank: Array, row: Array, to: Array, held: Array, heads: Array) -> list[Alike]:
    """Find the ranks that are alike.

    Args:
        rank: int64 (n,), positions of ranks.
        row: int64 (n,), rows among those of the rank.
        to: int64 (n,), the sum that it is added to.
        held: int64 (n,), elements.
        heads: uint64 (n,), what the checksum has beside its elements.
    """
    found: dict[tuple[bytes, bytes], list[tuple[int, Array]]] = {}
    for number in np.unique(rank).tolist():
        own = np.flatnonzero(rank == number)
        own = own[np.argsort(row[own], kind="stable")]
        while len(own):
            _, first = np.unique(to[own], return_index=True)  # a rank may have several rows for one sum
            once = own[np.sort(first)]
            found.setdefault((row[once].tobytes(), to[once].tobytes()), []).append((number, once))
            own = np.delete(own, first)
    return [
        Alike(
            tuple(number for number, _ in each),
            _span(row[each[0][1]]),
            _span(to[each[0][1]]),
            np.stack([held[own] for _, own in each]).astype(np.float64),
            np.stack([heads[own] for _, own in each]),
        )
        for each in found.values()
    ]


def _span(numbers: Array) -> Array | slice:
    """Numbers that follow one another, as a slice: nothing is copied to read it."""
    span = slice(int(numbers[0]), int(numbers[0]) + len(numbers))
    return span if np.array_equal(numbers, np.arange(span.start, span.stop)) else numbers
