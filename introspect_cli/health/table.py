"""One rank of a run as columns over its steps, which is what rules ask questions of.

The problem: a rule looks along time at one site, the store is ordered by step, and ten thousand sites by a thousand
steps of everything do not fit. The way: one pass over the steps fills float32 matrices of the few statistics that
rules use. Sites of which there are few (losses, batches, learning rates) keep every step; of the others every k-th
step is kept where there are too many. What must not be missed between kept steps (the first NaN, how far each
parameter moved) is gathered from every step during the pass.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from introspect_cli.records import Kind, Phase, Status

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from introspect_cli.records import Layout, ModuleInfo
    from introspect_cli.store.batch import StepBatch
    from introspect_cli.store.rank_reader import RankReader

MOST_CELLS = 6_000_000
"""Cells (steps by sites) kept of each statistic."""

STATS = ("min", "max", "mean", "amean", "var")
"""Float statistics that are kept."""

_FEW = frozenset({Kind.LOSS.value, Kind.BATCH.value, Kind.HYPERPARAMETER.value})
_MEASURED = (Status.OBSERVED.value, Status.PARTIAL.value)


@dataclass(frozen=True)
class NonFinite:
    """The first time a site held a value that is not finite."""

    step: int
    site: int
    sequence: int
    nans: int
    posinfs: int
    neginfs: int
    numel: int


@dataclass(frozen=True, eq=False)
class Columns:
    """Statistics of some sites over some steps.

    Attributes:
        steps: int64 (T,), step numbers.
        sites: int64 (S,), numbers of the sites in the rank's table.
        layout: int32 (T, S), number of the layout; -1 where nothing was measured.
        checksum: uint64 (T, S), 0 where not observed.
        floats: float32 (T, S) by name of `STATS`, NaN where absent; a plain number stands as its own mean.
        zeros: float32 (T, S), share of elements that are exactly zero; NaN where absent.
        bad: float32 (T, S), share of elements that are not finite; NaN where absent.
    """

    steps: NDArray[np.int64]
    sites: NDArray[np.int64]
    layout: NDArray[np.int32]
    checksum: NDArray[np.uint64]
    floats: dict[str, NDArray[np.float32]]
    zeros: NDArray[np.float32]
    bad: NDArray[np.float32]

    @classmethod
    def empty(cls, steps: NDArray[np.int64], sites: NDArray[np.int64]) -> Columns:
        """Columns in which nothing has been seen yet."""
        shape = len(steps), len(sites)
        return cls(
            steps,
            sites,
            np.full(shape, -1, np.int32),
            np.zeros(shape, np.uint64),
            {name: np.full(shape, np.nan, np.float32) for name in STATS},
            np.full(shape, np.nan, np.float32),
            np.full(shape, np.nan, np.float32),
        )

    @cached_property
    def place(self) -> dict[int, int]:
        """Column of each site's number."""
        return {int(site): column for column, site in enumerate(self.sites)}


@dataclass(frozen=True, eq=False)
class Moves:
    """How each trained parameter moved, at every step.

    Attributes:
        steps: int64 (T,), step numbers.
        names: FQN of each parameter.
        changed: int8 (T, P), 1 where the parameter's bits changed, 0 where not, -1 where it was not observed.
        relative: float32 (T, P), L2 length of the change over that of the parameter, NaN where unknown.
    """

    steps: NDArray[np.int64]
    names: list[str]
    changed: NDArray[np.int8]
    relative: NDArray[np.float32]


@dataclass(frozen=True, eq=False)
class Table:
    """A rank, ready to be asked.

    Attributes:
        rank: its number.
        stride: every `stride`-th step is kept in `many`.
        phase, kind, fqn, call, path, module_class, op, source: of each site, by number.
        order: int64, sequence of each site when it was first seen.
        layouts: of the rank.
        modules: of the rank.
        few: losses, batches and hyper-parameters, every step.
        many: all other sites.
        moves: of parameters.
        nonfinite: first such record of each site, by step and sequence.
    """

    rank: int
    stride: int
    phase: Sequence[str]
    kind: Sequence[str]
    fqn: Sequence[str]
    call: Sequence[int]
    path: Sequence[str]
    module_class: Sequence[str]
    op: Sequence[str]
    source: Sequence[str]
    order: NDArray[np.int64]
    layouts: Sequence[Layout]
    modules: Sequence[ModuleInfo]
    few: Columns
    many: Columns
    moves: Moves
    nonfinite: list[NonFinite] = field(default_factory=list)

    @cached_property
    def numel(self) -> NDArray[np.float64]:
        """Elements of each layout; the last entry, which -1 picks, is NaN."""
        return np.array([*(float(layout.numel) for layout in self.layouts), np.nan])

    @cached_property
    def _numbers(self) -> dict[tuple[str, str, str, int, str], int]:
        sites = zip(self.phase, self.kind, self.fqn, self.call, self.path, strict=True)
        return {site: number for number, site in enumerate(sites)}

    def site(self, phase: Phase, kind: Kind, fqn: str, call: int = 0, path: str = "") -> int | None:
        """Number of a site, None where there is none."""
        return self._numbers.get((phase.value, kind.value, fqn, call, path))

    def pick(self, *kinds: Kind, phase: Phase | None = None) -> list[int]:
        """Numbers of all sites of these kinds, in the order they were first seen."""
        wanted = {kind.value for kind in kinds}
        found = [
            number
            for number, kind in enumerate(self.kind)
            if kind in wanted and (phase is None or self.phase[number] == phase.value)
        ]
        return sorted(found, key=lambda number: int(self.order[number]))

    def columns(self, site: int) -> tuple[Columns, int]:
        """Where a site's statistics are: the columns and its place in them."""
        if site in self.few.place:
            return self.few, self.few.place[site]
        return self.many, self.many.place[site]

    def name(self, site: int) -> str:
        """A site for people."""
        call = f" call {self.call[site]}" if self.call[site] else ""
        if self.op[site]:
            where = f" at {self.source[site]}" if self.source[site] else ""
            return f"{self.op[site]} in {self.fqn[site]}{where}{call}"
        return f"{self.kind[site]} {self.fqn[site]}{self.path[site]}{call}"

    def layout(self, site: int) -> Layout | None:
        """The first layout a site was seen with."""
        columns, place = self.columns(site)
        seen = columns.layout[:, place]
        seen = seen[seen >= 0]
        return self.layouts[int(seen[0])] if len(seen) else None

    def l2(self, site: int) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """L2 norm of a site at the steps where it was measured."""
        columns, place = self.columns(site)
        rows = np.flatnonzero(columns.layout[:, place] >= 0)
        mean = columns.floats["mean"][rows, place].astype(np.float64)
        var = columns.floats["var"][rows, place].astype(np.float64)
        numel = self.numel[columns.layout[rows, place]]
        return columns.steps[rows], np.sqrt((var + mean * mean) * numel)

    def stat(self, site: int, name: str) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Step numbers and values of a statistic where it is present; `zeros` and `bad` are shares."""
        steps, values = self.stats(site, name)
        return steps, values[0]

    def stats(self, site: int, *names: str) -> tuple[NDArray[np.int64], list[NDArray[np.float64]]]:
        """The same of several statistics, at the steps where all of them are present."""
        columns, place = self.columns(site)
        own = {"zeros": columns.zeros, "bad": columns.bad, **columns.floats}
        values = [own[name][:, place].astype(np.float64) for name in names]
        rows = np.flatnonzero(~np.isnan(values).any(axis=0))
        return columns.steps[rows], [value[rows] for value in values]


def read_table(reader: RankReader, most_cells: int = MOST_CELLS) -> Table:
    """Read all steps of a rank once.

    Raises:
        StoreError: the run is damaged.
    """
    sites = reader.sites
    steps = reader.entries["step"].astype(np.int64)
    kinds = sites.kind
    is_few = np.array([kind in _FEW for kind in kinds], np.bool_)
    many = np.flatnonzero(~is_few)
    stride = max(1, -(-len(steps) * len(many) // most_cells))
    filler = _Filler(
        reader,
        Columns.empty(steps, np.flatnonzero(is_few)),
        Columns.empty(steps[::stride], many),
    )
    for row, step in enumerate(steps):
        batch = reader.read(int(step))
        filler.few(row, batch)
        if row % stride == 0:
            filler.many(row // stride, batch)
        filler.every(row, int(step), batch)
    return Table(
        rank=reader.rank,
        stride=stride,
        phase=sites.phase,
        kind=kinds,
        fqn=sites.fqn,
        call=sites.call.tolist(),
        path=sites.path,
        module_class=sites.module_class,
        op=sites.op,
        source=sites.source,
        order=filler.order,
        layouts=reader.layouts,
        modules=reader.modules,
        few=filler.columns[0],
        many=filler.columns[1],
        moves=Moves(steps, filler.parameters, filler.changed, filler.relative),
        nonfinite=sorted(filler.nonfinite, key=lambda event: (event.step, event.sequence)),
    )


class _Filler:
    """The table in the making."""

    def __init__(self, reader: RankReader, few: Columns, many: Columns) -> None:
        sites = reader.sites
        self.columns = few, many
        self.kind = sites.kind
        self.numel = np.array([float(layout.numel) for layout in reader.layouts] or [0.0])
        self.order = np.full(len(sites), np.iinfo(np.int64).max, np.int64)
        self._place = np.zeros(len(sites), np.int64)
        for columns in self.columns:
            self._place[columns.sites] = np.arange(len(columns.sites))
        self._is_few = np.zeros(len(sites), np.bool_)
        self._is_few[few.sites] = True
        self.nonfinite: list[NonFinite] = []
        self._was_bad = np.zeros(len(sites), np.bool_)
        self._is_setting = sites.setting
        params = {
            number: (sites.fqn[number], sites.phase[number])
            for number, kind in enumerate(self.kind)
            if kind == Kind.PARAM.value
        }
        # What no optimizer step leaves behind is not trained, and cannot be said to move.
        trained = sorted({fqn for fqn, phase in params.values() if phase == Phase.OPTIMIZER.value})
        self.parameters = trained
        index = {fqn: place for place, fqn in enumerate(trained)}
        self._param = np.full(len(sites), -1, np.int64)
        self._after = np.zeros(len(sites), np.bool_)
        for number, (fqn, phase) in params.items():
            self._param[number] = index.get(fqn, -1)
            self._after[number] = phase == Phase.OPTIMIZER.value
        shape = len(few.steps), len(trained)
        self.changed = np.full(shape, -1, np.int8)
        self.relative = np.full(shape, np.nan, np.float32)
        self._last_bits = np.zeros(len(trained), np.uint64)
        self._last_sketch: NDArray[np.float32] | None = None

    def few(self, row: int, batch: StepBatch) -> None:
        self._fill(self.columns[0], row, batch, np.flatnonzero(self._is_few[batch.site]))

    def many(self, row: int, batch: StepBatch) -> None:
        self._fill(self.columns[1], row, batch, np.flatnonzero(~self._is_few[batch.site]))

    def _fill(self, columns: Columns, row: int, batch: StepBatch, rows: NDArray[np.int64]) -> None:
        places = self._place[batch.site[rows]]
        measured = np.isin(batch.status[rows], _MEASURED)
        columns.layout[row, places[measured]] = batch.layout[rows[measured]]
        columns.checksum[row, places] = batch.checksum[rows]
        if batch.counts:
            with np.errstate(all="ignore"):
                for name in STATS:
                    columns.floats[name][row, places] = batch.floats[name][rows]
                numel = self.numel[batch.layout[rows]]
                zeros = batch.counts["zeros"][rows]
                columns.zeros[row, places] = np.where((zeros >= 0) & (numel > 0), zeros / numel, np.nan)
                bad = sum(batch.counts[name][rows] for name in ("nans", "posinfs", "neginfs"))
                known = batch.counts["nans"][rows] >= 0
                columns.bad[row, places] = np.where(known & (numel > 0), bad / numel, np.nan)
        for position in np.flatnonzero(batch.status[rows] == Status.VALUE.value):
            number = _number(batch.text[int(rows[position])])
            if number is not None:
                columns.floats["mean"][row, places[position]] = number

    def every(self, row: int, step: int, batch: StepBatch) -> None:
        np.minimum.at(self.order, batch.site, batch.sequence.astype(np.int64))
        if batch.counts:
            self._note_nonfinite(step, batch)
        if len(self.parameters):
            for after in (False, True):
                self._note_moves(row, batch, after=after)

    def _note_nonfinite(self, step: int, batch: StepBatch) -> None:
        counts = batch.counts
        bad = (counts["nans"] > 0) | (counts["posinfs"] > 0) | (counts["neginfs"] > 0)
        for position in np.flatnonzero(bad & ~self._was_bad[batch.site]):
            site = int(batch.site[position])
            self._was_bad[site] = True
            self.nonfinite.append(
                NonFinite(
                    step,
                    site,
                    int(batch.sequence[position]),
                    int(counts["nans"][position]),
                    int(counts["posinfs"][position]),
                    int(counts["neginfs"][position]),
                    int(self.numel[batch.layout[position]]),
                )
            )

    def _note_moves(self, row: int, batch: StepBatch, *, after: bool) -> None:
        own = self._param[batch.site]
        rows = np.flatnonzero((own >= 0) & (self._after[batch.site] == after) & (batch.checksum != 0))
        if not len(rows):
            return
        params, bits = own[rows], batch.checksum[rows]
        if batch.sketch is not None and self._last_sketch is None:
            self._last_sketch = np.full((len(self.parameters), batch.sketch.shape[1]), np.nan, np.float32)
        if after:
            known = self._last_bits[params] != 0
            self.changed[row, params[known]] = (bits != self._last_bits[params])[known]
            if self._last_sketch is not None and batch.sketch is not None and batch.counts:
                with np.errstate(all="ignore"):
                    moved = np.linalg.norm(batch.sketch[rows] - self._last_sketch[params], axis=1)
                    mean, var = batch.floats["mean"][rows], batch.floats["var"][rows]
                    size = np.sqrt((var + mean * mean) * self.numel[batch.layout[rows]])
                    self.relative[row, params] = np.where(size > 0, moved / size, np.nan)
        self._last_bits[params] = bits
        if self._last_sketch is not None and batch.sketch is not None:
            self._last_sketch[params] = batch.sketch[rows]


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
