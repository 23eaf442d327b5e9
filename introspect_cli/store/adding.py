"""Records of several ranks added up, one rank after the other.

Every rank numbers its records by itself, and a rank may hold several parts of one tensor. Which row is added to which
sum hardly ever changes from step to step, so it is worked out once, in turns: in a turn, rows of one rank go to as many
different sums. Adding up a step is then a few numpy operations a turn. The order is the ranks', so that equal records
give equal bits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from introspect_cli.sums import mix, unmix

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from introspect_cli.store.batch import StepBatch

    Array = NDArray[Any]

NONFINITE = ("nans", "posinfs", "neginfs")
EXTREMA = {"min": np.fmin, "max": np.fmax, "absmin": np.fmin}


class _Turn(NamedTuple):
    """Rows of one rank that are added to different sums.

    Attributes:
        rank: position of the rank.
        rows: n rows of it.
        to: the n sums that they are added to.
        held: float64 (n,), elements of each.
        heads: uint64 (n,), what each checksum has beside its elements.
    """

    rank: int
    rows: Array | slice
    to: Array | slice
    held: Array
    heads: Array


class Adding:
    """Adds up some rows of each rank."""

    def __init__(self, rank: Array, row: Array, to: Array, held: Array, heads: Array) -> None:
        """Work out the turns.

        Args:
            rank: int64 (n,), positions of ranks.
            row: int64 (n,), rows among those of the rank.
            to: int64 (n,), the sum that it is added to; every sum from 0 to the largest has one at least.
            held: int64 (n,), elements.
            heads: uint64 (n,), what the checksum has beside its elements.
        """
        self.size = int(to.max(initial=-1)) + 1
        self._turns: list[_Turn] = []
        self._head = np.zeros(self.size, np.uint64)
        for number in np.unique(rank).tolist():
            left = np.flatnonzero(rank == number)
            left = left[np.argsort(row[left], kind="stable")]
            while len(left):
                _, first = np.unique(to[left], return_index=True)
                once = left[np.sort(first)]
                left = np.delete(left, first)
                turn = _Turn(number, _span(row[once]), _span(to[once]), held[once].astype(np.float64), heads[once])
                self._turns.append(turn)
                self._head[turn.to] = turn.heads

    def checksums(self, batches: Sequence[StepBatch]) -> Array:
        """uint64, the checksums of wholes whose parts are added up, given the ranks' batches of a step."""
        raw = np.zeros(self.size, np.uint64)
        for turn in self._turns:
            raw[turn.to] += unmix(batches[turn.rank].checksum[turn.rows]) - turn.heads
        total_checksum: Array = mix(raw + self._head)
        return total_checksum

    def sketches(self, batches: Sequence[StepBatch]) -> Array:
        """float64 (sums, 16); every rank must have kept sketches."""
        first = np.asarray(batches[0].sketch)
        out = np.zeros((self.size, first.shape[1]))
        for turn in self._turns:
            out[turn.to] += np.asarray(batches[turn.rank].sketch)[turn.rows]
        return out

    def statistics(
        self, batches: Sequence[StepBatch], counts: Sequence[str], floats: Sequence[str]
    ) -> tuple[dict[str, Array], dict[str, Array]]:
        """Counts and other statistics by name, of those that add up.

        Returns:
            int64, -1 where a rank did not count; and float64, NaN where absent.
        """
        counted = {name: self._count([batch.counts[name] for batch in batches]) for name in counts}
        return counted, self._moments(batches, self._finite(batches, counted), floats)

    def _count(self, columns: Sequence[Array]) -> Array:
        out, signs = np.zeros(self.size, np.int64), np.zeros(self.size, np.int64)
        for turn in self._turns:
            values = columns[turn.rank][turn.rows]
            out[turn.to] += values
            signs[turn.to] |= values
        return np.where(signs >= 0, out, -1)

    def _finite(self, batches: Sequence[StepBatch], counted: dict[str, Array]) -> list[Array]:
        """Of each turn, the numbers of finite elements."""
        names = [name for name in NONFINITE if name in counted]
        if not any(counted[name].any() for name in names):
            return [turn.held for turn in self._turns]
        every = []
        for turn in self._turns:
            columns = [batches[turn.rank].counts[name][turn.rows] for name in names]
            every.append(turn.held - sum(np.maximum(values, 0) for values in columns))
        return every

    def _moments(self, batches: Sequence[StepBatch], finite: list[Array], names: Sequence[str]) -> dict[str, Array]:
        """Extrema and moments of all finite elements, given those of each row; NaN where one is absent."""
        total = np.zeros(self.size)
        for turn, sizes in zip(self._turns, finite, strict=True):
            total[turn.to] += sizes
        full = all(bool((sizes > 0).all()) for sizes in finite)

        def used(sizes: Array, values: Array, other: float) -> Array:
            return values if full else np.where(sizes > 0, values, other)

        def mean(values_of: Callable[[_Turn], Array]) -> Array:
            sums = np.zeros(self.size)
            for turn, sizes in zip(self._turns, finite, strict=True):
                sums[turn.to] += sizes * used(sizes, values_of(turn), 0.0)
            of_all: Array = np.divide(sums, total, out=np.full(self.size, np.nan), where=total > 0)
            return of_all

        def column(name: str) -> Callable[[_Turn], Array]:
            return lambda turn: np.asarray(batches[turn.rank].floats[name][turn.rows])

        moments: dict[str, Array] = {}
        for name, which in EXTREMA.items():
            if name in names:
                moments[name] = np.full(self.size, np.nan)
                for turn, sizes in zip(self._turns, finite, strict=True):
                    moments[name][turn.to] = which(moments[name][turn.to], used(sizes, column(name)(turn), np.nan))
        for name in ("mean", "amean"):
            if name in names:
                moments[name] = mean(column(name))
        if "var" in names and "mean" in moments:
            var, means, middle = column("var"), column("mean"), moments["mean"]
            moments["var"] = mean(lambda turn: var(turn) + (means(turn) - middle[turn.to]) ** 2)
        return moments


def _span(numbers: Array) -> Array | slice:
    """Numbers that follow one another, as a slice: nothing is copied to read it."""
    span = slice(int(numbers[0]), int(numbers[0]) + len(numbers))
    return span if np.array_equal(numbers, np.arange(span.start, span.stop)) else numbers
