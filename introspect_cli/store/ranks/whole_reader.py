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

from introspect_cli.records import Kind, Status
from introspect_cli.store.format.batch import rows_of
from introspect_cli.store.format.log import ENTRY
from introspect_cli.store.ranks.combine import Combiner
from introspect_cli.store.ranks.combined import join_slices
from introspect_cli.store.ranks.digests import digests
from introspect_cli.store.ranks.stacked import LayoutTables, StackedStep
from introspect_cli.store.ranks.whole_names import WholeNames
from introspect_cli.store.read.rank_reader import RankReader, read_rows
from introspect_cli.store.read.step_reader import StepReader

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

_FEWEST, _MOST = 4, 64
"""Steps that are combined elsewhere before they are asked for: a comparison may need no more than a few, or all."""

_STATES = frozenset({Kind.PARAM.value, Kind.OPTIMIZER_STATE.value})


class WholeReader(WholeNames, StepReader):
    """All ranks of a run, read as one rank.

    Attributes:
        rank: the lowest of them.
    """

    is_whole = True

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
        """Combine the ranks' readers.

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
        self.many = len(self.readers)
        self._lacking, self._complete = lacking, complete
        self.rank = self.readers[0].rank
        self.running = any(reader.running for reader in self.readers)
        self.ended = all(reader.ended for reader in self.readers)
        self.thinned = tuple(dict.fromkeys(dropped for reader in self.readers for dropped in reader.thinned))
        self._sizes: dict[int, int] = {}
        self._forms = np.zeros(0, np.int64)
        self._combine = combine
        self._ahead: list[int] = []
        self._at_once = _FEWEST
        self._combined: dict[int, StepBatch] = {}
        self._last_combiner: tuple[tuple[int, int], Combiner] | None = None
        self._read = lru_cache(maxsize=3)(self._combined_row)

    @cached_property
    def steps_of_all(self) -> NDArray[np.int64]:
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
        out = np.zeros(len(self.steps_of_all), ENTRY)
        out["step"] = self.steps_of_all
        of_each = [reader.entries["digest"][rows] for reader, rows in zip(self.readers, self._rows, strict=True)]
        every = np.stack(of_each, axis=1) if len(out) else ()
        chain, step_digests, chains = bytes(16), [], []
        for digest, ranks in zip(self._free_digests(), every, strict=True):
            step_digests.append(digest or blake2b(ranks.tobytes(), digest_size=16).digest())
            chain = blake2b(chain + step_digests[-1], digest_size=16).digest()
            chains.append(chain)
        out["digest"] = np.frombuffer(b"".join(step_digests), out["digest"].dtype)
        out["chain"] = np.frombuffer(b"".join(chains), out["chain"].dtype)
        return out

    def _free_digests(self) -> list[bytes | None]:
        """For each step a digest that is equal in any layout; None where the ranks' totals do not tell."""
        if self._fold or self.stages or self._lacking or len(self.readers) == 1:
            return [None] * len(self.steps_of_all)
        step_digests, self._forms = digests(self, self._places, self._rows, self._sample)
        return step_digests

    def _sample(self, row: int) -> Iterator[Plan]:
        """Combine the step at a position slice by slice, giving each slice's plan; notes the number of records."""
        size, of = 0, self.slices_of(row)
        for which in range(of):
            combiner = self._combiner(which, of)
            size += len(combiner.combine(self._stacked(row, which, of)))
            assert combiner.plan is not None  # a step was put together just now
            yield combiner.plan
        self._sizes[row] = size

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

        No index says that: a step that was not read before is read, unless one with the same forms was.
        """
        every = np.arange(len(self))[rows]
        forms = self._forms[every] if len(self._forms) else np.full(len(every), -1, np.int64)
        sizes = {int(self._forms[row]): size for row, size in self._sizes.items() if len(self._forms)}
        total = 0
        for row, form in zip(every.tolist(), forms.tolist(), strict=True):
            size = self._sizes.get(row, sizes.get(form) if form >= 0 else None)
            if size is None:
                size = sizes[form] = len(self.read_row(row))
            total += size
        return total

    def values_of(self, step: int, site: int) -> dict[int, tuple[int, ...]]:
        """The ranks' values of a site in a step: shape by checksum.

        The shape is () for a value that is a part of a whole and for one that was not observed.
        """
        shapes: dict[int, tuple[int, ...]] = {}
        for reader, numbers in zip(self.readers, self.numbers, strict=True):
            batch = reader.read(step)
            for row in np.flatnonzero(numbers[np.asarray(batch.site)] == site).tolist():
                layout = reader.layouts[int(batch.layout[row])]
                seen = batch.status[row] == int(Status.OBSERVED) and layout.part is None
                shapes[int(batch.checksum[row])] = layout.shape if seen else ()
        return shapes

    # --- putting together

    def ahead(self, rows: Sequence[int]) -> None:
        """Announce the steps (positions) that will be read, in order, so that several are combined at once."""
        self._ahead = list(rows)

    def read_row(self, row: int) -> StepBatch:
        """The combined records of the `row`-th step."""
        return self._read(row)

    def _combined_row(self, row: int) -> StepBatch:
        """Combine the `row`-th step, with the announced steps after it where `combine` is given."""
        if self._combine is None:
            of = self.slices_of(row)
            batch = join_slices([self.read_slice(row, which, of) for which in range(of)])
        else:
            if row not in self._combined:
                rows = [row]
                if row in self._ahead:
                    at = self._ahead.index(row)
                    rows, self._at_once = self._ahead[at : at + self._at_once], min(2 * self._at_once, _MOST)
                self._combined = dict(zip(rows, self._combine(self, rows), strict=True))
            batch = self._combined.pop(row)
        self._sizes[row] = len(batch)
        return batch

    def slices_of(self, row: int) -> int:
        """In how many slices of sites the step is combined, so that each has at most about `MOST_ROWS` records."""
        rows = sum(int(reader.entries["rows"][at]) for reader, at in zip(self.readers, self._rows[:, row], strict=True))
        return max(1, min(-(-rows // MOST_ROWS), len(self.sites)))

    def read_slice(self, row: int, which: int, of: int) -> StepBatch:
        """Combine slice `which` of `of` slices of the `row`-th step, to be given to `join_slices`."""
        return self._combiner(which, of).combine(self._stacked(row, which, of))

    def _stacked(self, row: int, which: int, of: int) -> StackedStep:
        """The records of a slice of the `row`-th step of all ranks."""
        wanted = None if of == 1 else self._slices(of) == which
        batches = []
        read = read_rows(self.readers, self._rows[:, row].tolist())
        for batch, numbers in zip(read, self.numbers, strict=True):
            rows = None if wanted is None else np.flatnonzero(wanted[numbers[np.asarray(batch.site)]])
            batches.append(batch if rows is None else rows_of([batch], [rows]))
        ranks = [reader.rank for reader in self.readers]
        return StackedStep(batches, ranks, self.numbers, self._places.numbers, self._combiner(which, of).rows)

    def _slices(self, of: int) -> Array:
        """int64 (sites,), the slice of each site: its number modulo `of`; a gradient's is that of its value."""
        number = np.arange(len(self.sites))
        return np.where(self.value_of < 0, number, self.value_of) % of

    @cached_property
    def _rows(self) -> Array:
        """int64 (ranks, steps), position of each common step among each rank's entries."""
        steps = self.steps_of_all
        return np.stack([np.searchsorted(reader.entries["step"], steps) for reader in self.readers])

    @cached_property
    def _places(self) -> LayoutTables:
        return LayoutTables(self.readers)

    def _combiner(self, which: int, of: int) -> Combiner:
        """The combiner of a slice; kept until another slice is asked for."""
        if self._last_combiner is None or self._last_combiner[0] != (which, of):
            combiner = Combiner(self._places, self, self._lacking, complete=self._complete)
            self._last_combiner = (which, of), combiner
        return self._last_combiner[1]


Combine = Callable[[WholeReader, "Sequence[int]"], "Iterator[StepBatch]"]

Reader = RankReader | WholeReader
"""What can be read like one rank: one, or all as one."""
