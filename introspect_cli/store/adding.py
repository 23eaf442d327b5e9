"""Records of several ranks added up, rank on rank, as long as a plan holds.

Which row of which rank is added to which sum hardly changes from step to step. Most ranks have the same rows for the
same sums, so their columns lie on one another as they were read: nothing is sorted, and nothing is put end to end.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from introspect_cli.sums import mix, unmix

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

    from introspect_cli.store.batch import StepBatch

    Array = NDArray[Any]

NONFINITE = ("nans", "posinfs", "neginfs")
EXTREMA = {"min": np.fmin, "max": np.fmax, "absmin": np.fmin}


@dataclass(frozen=True)
class _Alike:
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


class Adding:
    """Adds up some rows of each rank."""

    def __init__(self, rank: Array, row: Array, to: Array, held: Array, heads: Array) -> None:
        """Find the ranks that are alike.

        Args:
            rank: int64 (n,), positions of ranks.
            row: int64 (n,), rows among those of the rank.
            to: int64 (n,), the sum that it is added to; every sum from 0 to the largest has one at least.
            held: int64 (n,), elements.
            heads: uint64 (n,), what the checksum has beside its elements.
        """
        self.size = int(to.max(initial=-1)) + 1
        found: dict[tuple[bytes, bytes], list[tuple[int, Array]]] = {}
        for number in np.unique(rank).tolist():
            own = np.flatnonzero(rank == number)
            own = own[np.argsort(row[own], kind="stable")]
            while len(own):
                _, first = np.unique(to[own], return_index=True)  # a rank may have several rows for one sum
                once = own[np.sort(first)]
                found.setdefault((row[once].tobytes(), to[once].tobytes()), []).append((number, once))
                own = np.delete(own, first)
        self._alike = [
            _Alike(
                tuple(number for number, _ in each),
                _span(row[each[0][1]]),
                _span(to[each[0][1]]),
                np.stack([held[own] for _, own in each]).astype(np.float64),
                np.stack([heads[own] for _, own in each]),
            )
            for each in found.values()
        ]
        self._head = np.zeros(self.size, np.uint64)
        for alike in self._alike:
            self._head[alike.to] = alike.heads[0]

    def checksums(self, columns: Sequence[Array]) -> Array:
        """Of each sum, the checksum of the whole whose parts are added up."""
        raw = np.zeros(self.size, np.uint64)
        for alike in self._alike:
            raw[alike.to] += (unmix(alike.stacked(columns)) - alike.heads).sum(axis=0, dtype=np.uint64)
        found: Array = mix(raw + self._head)
        return found

    def sketches(self, columns: Sequence[Array]) -> Array:
        """The sum of sketches, float64 (sums, numbers)."""
        out = np.zeros((self.size, columns[0].shape[1]))
        for alike in self._alike:
            for rank in alike.ranks:
                out[alike.to] += columns[rank][alike.rows]
        return out

    def statistics(
        self, batches: Sequence[StepBatch], counts: Iterable[str], floats: Iterable[str]
    ) -> tuple[dict[str, Array], dict[str, Array]]:
        """Statistics of all elements of each sum together: counts, and others; those that do not add up are left out.

        Args:
            batches: of the ranks.
            counts: names of the counts that all ranks have.
            floats: names of the other statistics that all have.
        """
        counted = {name: self._count([batch.counts[name] for batch in batches]) for name in counts}
        clean = not any(counted[name].any() for name in NONFINITE if name in counted)
        return counted, _Moments(self._alike, self.size, batches, clean=clean).of(floats)

    def _count(self, columns: Sequence[Array]) -> Array:
        """int64; -1 where a rank did not count."""
        out, known = np.zeros(self.size, np.int64), np.ones(self.size, np.bool_)
        for own in self._alike:
            values = own.stacked(columns)
            out[own.to] += values.sum(axis=0)
            known[own.to] &= values.min(axis=0) >= 0
        return out if known.all() else np.where(known, out, -1)


class _Moments:
    """Extrema and moments of finite elements, given those of each row of each rank."""

    def __init__(self, alike: list[_Alike], size: int, batches: Sequence[StepBatch], *, clean: bool) -> None:
        """Count the elements; where all is `clean`, all are finite."""
        self._alike, self._size, self._batches = alike, size, batches
        self._finite = [own.held if clean else own.held - self._left_out(own) for own in alike]
        self._total = self._added(iter(self._finite))
        self._full = all(bool((own > 0).all()) for own in self._finite)

    def of(self, names: Iterable[str]) -> dict[str, Array]:
        """Those of some names that can be told, float64, NaN where one is absent."""
        found: dict[str, Array] = {}
        for name in sorted(names, key="var".__eq__):  # it follows from the mean
            columns = [batch.floats[name] for batch in self._batches]
            if name in EXTREMA:
                found[name] = self._extreme(EXTREMA[name], columns)
            elif name in ("mean", "amean"):
                found[name] = self._mean(own.stacked(columns) for own in self._alike)
            elif name == "var" and "mean" in found:
                means, middle = [batch.floats["mean"] for batch in self._batches], found["mean"]
                found[name] = self._mean(
                    own.stacked(columns) + (own.stacked(means) - middle[own.to]) ** 2 for own in self._alike
                )
        return found

    def _left_out(self, own: _Alike) -> Array:
        names = [name for name in NONFINITE if all(name in batch.counts for batch in self._batches)]
        stacks = (own.stacked([batch.counts[name] for batch in self._batches]) for name in names)
        return np.asarray(sum(np.maximum(values, 0) for values in stacks))

    def _extreme(self, which: Any, columns: list[Array]) -> Array:
        out = np.full(self._size, np.nan)
        for own, finite in zip(self._alike, self._finite, strict=True):
            out[own.to] = which(out[own.to], which.reduce(self._used(finite, own.stacked(columns), np.nan), axis=0))
        return out

    def _used(self, finite: Array, values: Array, other: float) -> Array:
        return values if self._full else np.where(finite > 0, values, other)

    def _mean(self, each: Iterable[Array]) -> Array:
        """The mean over all elements, given that of each row of each rank."""
        pairs = zip(self._finite, each, strict=True)
        sums = self._added(np.asarray(finite * self._used(finite, values, 0.0)) for finite, values in pairs)
        found: Array = np.divide(sums, self._total, out=np.full(self._size, np.nan), where=self._total > 0)
        return found

    def _added(self, each: Iterable[Array]) -> Array:
        out = np.zeros(self._size)
        for own, values in zip(self._alike, each, strict=True):
            out[own.to] += values.sum(axis=0)
        return out


def _span(numbers: Array) -> Array | slice:
    """Numbers that follow one another, as a slice: nothing is copied to read it."""
    span = slice(int(numbers[0]), int(numbers[0]) + len(numbers))
    return span if np.array_equal(numbers, np.arange(span.start, span.stop)) else numbers
