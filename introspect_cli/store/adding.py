"""Records of several ranks added up, rank on rank, as long as a plan holds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from introspect_cli.store.alike import Added, alike_ranks
from introspect_cli.store.compiled import compiled
from introspect_cli.store.compiled_adding import CompiledAdding
from introspect_cli.sums import mix, unmix

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

    from introspect_cli.store.alike import Alike
    from introspect_cli.store.batch import StepBatch

    Array = NDArray[Any]

NONFINITE = ("nans", "posinfs", "neginfs")
EXTREMA = {"min": np.fmin, "max": np.fmax, "absmin": np.fmin}


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
        self._alike = alike_ranks(rank, row, to, held, heads)
        self._head = np.zeros(self.size, np.uint64)
        for alike in self._alike:
            self._head[alike.to] = alike.heads[0]
        extension = compiled()
        self._compiled = None if extension is None else CompiledAdding(extension, self._alike, self._head)

    def add(self, batches: Sequence[StepBatch], counts: Sequence[str], floats: Sequence[str]) -> Added:
        """The sums of a step.

        Args:
            batches: of the ranks.
            counts: names of the counts that all ranks have.
            floats: names of the other statistics that all have.
        """
        found = None if self._compiled is None else self._compiled.add(batches, {*counts, *floats})
        if found is not None:
            return found
        sketches = [batch.sketch for batch in batches]
        return Added(
            self._checksums([batch.checksum for batch in batches]),
            None if any(own is None for own in sketches) else self._sketches(sketches),
            *self._statistics(batches, counts, floats),
        )

    def _checksums(self, columns: Sequence[Array]) -> Array:
        raw = np.zeros(self.size, np.uint64)
        for alike in self._alike:
            raw[alike.to] += (unmix(alike.stacked(columns)) - alike.heads).sum(axis=0, dtype=np.uint64)
        found: Array = mix(raw + self._head)
        return found

    def _sketches(self, columns: Sequence[Any]) -> Array:
        out = np.zeros((self.size, columns[0].shape[1]))
        for alike in self._alike:
            for rank in alike.ranks:
                out[alike.to] += columns[rank][alike.rows]
        return out

    def _statistics(
        self, batches: Sequence[StepBatch], counts: Iterable[str], floats: Iterable[str]
    ) -> tuple[dict[str, Array], dict[str, Array]]:
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

    def __init__(self, alike: list[Alike], size: int, batches: Sequence[StepBatch], *, clean: bool) -> None:
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

    def _left_out(self, own: Alike) -> Array:
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
            # Rank after rank: of one column numpy's sum takes another order.
            out[own.to] += values.sum(axis=0) if values.shape[1] > 1 else np.add.accumulate(values)[-1]
        return out
