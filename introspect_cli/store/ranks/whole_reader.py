"""All ranks of a run as if one process had recorded it: what a comparison of two layouts reads.

A parameter may be whole on every rank, or cut over some; a batch is some samples here and the others
there; a layer may run on one rank alone. So records are put together by site. Equal records are copies and count
once. Parts whose place is known add up: checksum, sketch and moments are sums over elements keyed by their index in
the whole. Values that differ from rank to rank without a place (samples, activations, losses) are gathered: of these
only what depends neither on order nor on layout is known, their extrema and means. What cannot be put together counts
as not observed, and says why.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property, lru_cache
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import numpy as np

from introspect_cli.records import Kind
from introspect_cli.store.format.batch import rows_of
from introspect_cli.store.format.log import ENTRY
from introspect_cli.store.ranks.combine import Combiner, join_slices
from introspect_cli.store.ranks.digests import layout_free_digests
from introspect_cli.store.ranks.stacked import LayoutTables, Rows, StackedStep
from introspect_cli.store.ranks.whole_names import WholeNames
from introspect_cli.store.read.rank_reader import RankReader, read_rows
from introspect_cli.store.read.step_reader import Reader

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from introspect_cli.labels import Labels
    from introspect_cli.store.format.batch import StepBatch
    from introspect_cli.store.format.log import Entries
    from introspect_cli.store.ranks.plan import Plan
    from introspect_cli.store.read.manifests import Stages

    Array = NDArray[Any]

MOST_ROWS = 1_000_000
"""Records of ranks that are put together at once: of all that is recorded, some 300 MB."""

_FEWEST_AT_ONCE, _MOST_AT_ONCE = 4, 64
"""Steps that are combined elsewhere before they are asked for: a comparison may need no more than a few, or all."""

_STATES = frozenset({Kind.PARAM.value, Kind.OPTIMIZER_STATE.value})


class WholeReader(WholeNames, Reader):
    """All ranks of a run, read as one rank.

    Attributes:
        rank: the lowest of them.
    """

    is_whole = True
    readers: list[RankReader]

    def __init__(
        self,
        path: str,
        readers: Sequence[RankReader],
        fold: Mapping[tuple[bool, str], int] | None = None,
        stages: Mapping[int, Stages] | None = None,
        *,
        lacking: str = "",
        complete: bool = False,
        combine: Combine | None = None,
    ) -> None:
        """Combine what the ranks' readers know by now; records and names are read when asked for.

        Args:
            path: the run, for messages.
            readers: of the ranks, at least one, by rank.
            fold: as `WholeNames` takes it.
            stages: as `WholeNames` takes it.
            lacking: why values that each rank has its own of are not all there; "" where they are.
            complete: whether these are all ranks of the run.
            combine: combines steps at some positions in other processes; None to combine here.
        """
        super().__init__(path, readers, fold, stages)
        self.rank_count = len(self.readers)
        self.rank = self.readers[0].rank
        self.running = any(reader.running for reader in self.readers)
        self.ended = all(reader.ended for reader in self.readers)
        self.thinned = tuple(dict.fromkeys(dropped for reader in self.readers for dropped in reader.thinned))
        self._lacking, self._complete, self._combine = lacking, complete, combine
        self._sizes: dict[tuple[int, int], int] = {}
        self._forms = np.full(len(self.common_steps), -1, np.int64)
        self._announced: list[int] = []
        self._at_once = _FEWEST_AT_ONCE
        self._combined: dict[int, StepBatch] = {}
        self._last_combiner: tuple[tuple[int, int], Combiner] | None = None
        self._read = lru_cache(maxsize=3)(self._combined_row)

    @cached_property
    def common_steps(self) -> NDArray[np.int64]:
        """int64, the numbers of the steps that every rank has, rising."""
        common = self.readers[0].entries["step"]
        for reader in self.readers[1:]:
            if not np.array_equal(common, reader.entries["step"]):
                common = np.intersect1d(common, reader.entries["step"])
        return np.asarray(common, np.int64)

    @cached_property
    def entries(self) -> Entries:  # type: ignore[override]  # mypy takes it for a property that cannot be set
        """Entries of the steps that every rank has; `rows` is 0, see `rows_in`.

        Their digests are the same in any layout where the ranks' totals tell, and else are over the ranks' digests.
        """
        out = np.zeros(len(self.common_steps), ENTRY)
        out["step"] = self.common_steps
        of_each = [reader.entries["digest"][rows] for reader, rows in zip(self.readers, self._positions, strict=True)]
        every = np.stack(of_each, axis=1) if len(out) else ()
        chain, step_digests, chains = bytes(16), [], []
        for digest, ranks in zip(self._layout_free_digests(), every, strict=True):
            step_digests.append(digest or blake2b(ranks.tobytes(), digest_size=16).digest())
            chain = blake2b(chain + step_digests[-1], digest_size=16).digest()
            chains.append(chain)
        out["digest"] = np.frombuffer(b"".join(step_digests), out["digest"].dtype)
        out["chain"] = np.frombuffer(b"".join(chains), out["chain"].dtype)
        return out

    def _layout_free_digests(self) -> list[bytes | None]:
        """For each step a digest that is equal in any layout; None where the ranks' totals do not tell."""
        if self._fold or self.stages or self._lacking or len(self.readers) == 1:
            return [None] * len(self.common_steps)
        step_digests, self._forms = layout_free_digests(self, self._tables, self._positions, self._plans)
        return step_digests

    def _plans(self, row: int) -> list[Plan]:
        """The plan of each slice of the step at a position; notes its number of records for `rows_in`."""
        of = self._slices_of(row)
        plans = [self._combiner(which, of).planned(self._stacked(row, which, of)) for which in range(of)]
        self._sizes[self._size_key(row)] = sum(len(plan.starts) for plan in plans)
        return plans

    @property
    def layout_mark(self) -> str:
        """16 hex digits over each rank's parts and names of parameters and buffers: equal for runs sharded alike."""
        digest = blake2b(digest_size=8)
        for reader in self.readers:
            parts = sorted({str((layout.shape, layout.part)) for layout in reader.layouts if layout.part is not None})
            held = sorted({row for row in zip(reader.sites.fqn, reader.sites.kind, strict=True) if row[1] in _STATES})
            digest.update(repr((reader.rank, parts, held)).encode())
        return digest.hexdigest()

    @cached_property
    def labels(self) -> dict[int, Labels]:
        """Labels by step; where ranks differ, the first rank's."""
        labels: dict[int, Labels] = {}
        for reader in reversed(self.readers):
            labels |= reader.labels
        return labels

    def rows_in(self, rows: Array) -> int:
        """Number of combined records in some steps (positions among the entries).

        No index says that: a step is planned for it, unless one with the same forms of totals was planned or read.
        """
        every = np.arange(len(self))[rows].tolist()
        for row in every:
            if self._size_key(row) not in self._sizes:
                self._plans(row)
        return sum(self._sizes[self._size_key(row)] for row in every)

    def _size_key(self, row: int) -> tuple[int, int]:
        """A key that is equal only for steps with as many combined records: the forms, else the position."""
        form = int(self._forms[row])
        return (form, -1) if form >= 0 else (-1, row)

    # --- putting together

    def prefetch(self, rows: Sequence[int]) -> None:
        """Announce the steps (positions) that will be read, in order.

        The next `read_row` then combines several at once.
        """
        self._announced = list(rows)

    def read_row(self, row: int) -> StepBatch:
        """The combined records of the `row`-th step; the last 3 are cached."""
        return self._read(row)

    def _combined_row(self, row: int) -> StepBatch:
        """Combine the `row`-th step, with the announced steps after it where `combine` is given."""
        if self._combine is None:
            of = self._slices_of(row)
            slices = range(of)
            batch = join_slices([self._combiner(at, of).combine(self._stacked(row, at, of)) for at in slices])
        else:
            if row not in self._combined:
                rows = [row]
                if row in self._announced:
                    at = self._announced.index(row)
                    rows, self._at_once = (
                        self._announced[at : at + self._at_once],
                        min(2 * self._at_once, _MOST_AT_ONCE),
                    )
                self._combined = dict(zip(rows, self._combine(self, rows), strict=True))
            batch = self._combined.pop(row)
        self._sizes[self._size_key(row)] = len(batch)
        return batch

    def _slices_of(self, row: int) -> int:
        """In how many slices of sites the step is combined, so that each has at most about `MOST_ROWS` records."""
        rows = sum(
            int(reader.entries["rows"][at]) for reader, at in zip(self.readers, self._positions[:, row], strict=True)
        )
        return max(1, min(-(-rows // MOST_ROWS), len(self.sites)))

    def _stacked(self, row: int, which: int, of: int) -> StackedStep:
        """The records of slice `which` of `of` of the `row`-th step of all ranks.

        A site is in the slice of its number modulo `of`; a gradient in that of its value.
        """
        batches, read = [], read_rows(self.readers, self._positions[:, row].tolist())
        wanted = np.where(self.value_of < 0, np.arange(len(self.sites)), self.value_of) % of == which
        for batch, numbers in zip(read, self.site_numbers, strict=True):
            rows_of_slice = np.flatnonzero(wanted[numbers[batch.site]])
            batches.append(batch if of == 1 else rows_of([batch], [rows_of_slice]))
        plan = self._combiner(which, of).plan
        alike = plan is not None and plan.basis.are_of(batches)
        rows = (
            plan.basis if plan is not None and alike else Rows(batches, self.site_numbers, self._tables.common_numbers)
        )
        return StackedStep(batches, [reader.rank for reader in self.readers], rows)

    @cached_property
    def _positions(self) -> Array:
        """int64 (ranks, steps), position of each common step among each rank's entries."""
        return np.stack([np.searchsorted(reader.entries["step"], self.common_steps) for reader in self.readers])

    @cached_property
    def _tables(self) -> LayoutTables:
        return LayoutTables(self.readers)

    def _combiner(self, which: int, of: int) -> Combiner:
        """The combiner of slice `which` of `of`; the same one until another slice is asked for."""
        if self._last_combiner is None or self._last_combiner[0] != (which, of):
            combiner = Combiner(self._tables, self, self._lacking, complete=self._complete)
            self._last_combiner = (which, of), combiner
        return self._last_combiner[1]


Combine = Callable[[WholeReader, "Sequence[int]"], "Iterator[StepBatch]"]
