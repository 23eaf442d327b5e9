"""One rank of a run as columns over its steps, which is what rules ask questions of.

A rule looks along time at one site, the store is ordered by step, and ten thousand sites by a thousand steps of
everything do not fit. One pass over the steps fills float32 matrices of the few statistics that rules use. Sites of
which there are few (losses, batches, learning rates) keep every step; of the others every k-th step is kept where there
are too many. What must not be missed between kept steps (the first NaN, how far each parameter moved) is gathered from
every step during the pass.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from introspect_cli.derived import l2_norm
from introspect_cli.health.findings import Hit
from introspect_cli.records import Kind, Phase, Status

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import NDArray

    from introspect_cli.records import Layout
    from introspect_cli.store.batch import StepBatch
    from introspect_cli.store.names import SiteTable
    from introspect_cli.store.reader import RankReader

STATS = ("min", "max", "mean", "amean", "var")
"""Statistics that are kept as they were recorded; a plain number is its mean."""

SHARES = ("zeros", "bad")
"""Statistics that are kept as shares of the elements: those that are exactly zero, those that are not finite."""

SiteName = tuple[str, str, str, int, str]
"""Phase, kind, FQN, call, path."""

_FLOATS = ("float", "bfloat")


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


class Column(NamedTuple):
    """One site over some steps.

    Attributes:
        steps: int64 (T,), step numbers.
        layout: int32 (T,), number of the layout; -1 where nothing was measured.
        checksum: uint64 (T,), 0 where not observed.
        floats: float32 (T,) by name of `STATS` and `SHARES`, NaN where absent.
    """

    steps: NDArray[np.int64]
    layout: NDArray[np.int32]
    checksum: NDArray[np.uint64]
    floats: dict[str, NDArray[np.float32]]


@dataclass(frozen=True, eq=False)
class Columns:
    """Some sites over some steps: as `Column`, with (T, S) in place of (T,).

    Attributes:
        sites: int64 (S,), numbers of the sites in the rank's table.
    """

    steps: NDArray[np.int64]
    sites: NDArray[np.int64]
    layout: NDArray[np.int32]
    checksum: NDArray[np.uint64]
    floats: dict[str, NDArray[np.float32]]

    @classmethod
    def empty(cls, steps: NDArray[np.int64], sites: NDArray[np.int64]) -> Columns:
        """Columns to be filled: statistics NaN, layouts -1, checksums 0."""
        shape = len(steps), len(sites)
        floats = {name: np.full(shape, np.nan, np.float32) for name in (*STATS, *SHARES)}
        return cls(steps, sites, np.full(shape, -1, np.int32), np.zeros(shape, np.uint64), floats)

    @cached_property
    def place(self) -> dict[int, int]:
        """Column number by site number."""
        return {int(site): column for column, site in enumerate(self.sites)}

    def column(self, site: int) -> Column:
        """The column of one site, as views of these arrays; KeyError for a site that is not in them."""
        place = self.place[site]
        floats = {name: values[:, place] for name, values in self.floats.items()}
        return Column(self.steps, self.layout[:, place], self.checksum[:, place], floats)


@dataclass(frozen=True, eq=False)
class Moves:
    """Change of each trained parameter in every step.

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

    @cached_property
    def skipped(self) -> set[int]:
        """Steps with observed parameters in which none changed, as where a gradient scaler skips."""
        seen = (self.changed >= 0).any(axis=1)
        return set(self.steps[seen & ~(self.changed == 1).any(axis=1)].tolist())


@dataclass(frozen=True, eq=False)
class Table:
    """All records of one rank as columns over steps.

    Attributes:
        reader: of the rank.
        stride: every `stride`-th step is kept in `many`.
        order: int64, sequence of each site when it was first seen.
        few: losses, batches and hyper-parameters, in every step.
        many: all other sites, in every `stride`-th step.
        moves: changes of parameters.
        nonfinite: the first record of each site that is not finite, by step and sequence.
    """

    reader: RankReader
    stride: int
    order: NDArray[np.int64]
    few: Columns
    many: Columns
    moves: Moves
    nonfinite: list[NonFinite]

    @property
    def sites(self) -> SiteTable:
        """All sites, by number."""
        return self.reader.sites

    @property
    def fqn(self) -> Sequence[str]:
        """FQN of each site."""
        return self.reader.sites.fqn

    @property
    def call(self) -> NDArray[np.uint32]:
        """Call of each site."""
        return self.reader.sites.call

    @property
    def path(self) -> Sequence[str]:
        """Path of each site."""
        return self.reader.sites.path

    def of_call(self, site: int, kind: Kind, path: str = "") -> int | None:
        """Number of the site of another kind, in its usual phase, of the same call; None where there is none."""
        phase = kind.phase.value if kind.phase is not None else ""
        return self.numbers.get((phase, kind.value, self.fqn[site], int(self.call[site]), path))

    @cached_property
    def numel(self) -> NDArray[np.float64]:
        """Elements of each layout; the last entry, which -1 picks, is NaN."""
        return np.array([*(float(layout.numel) for layout in self.reader.layouts), np.nan])

    @cached_property
    def numbers(self) -> dict[SiteName, int]:
        """Number of each site by its name."""
        of = self.sites
        names = zip(of.phase, of.kind, of.fqn, of.call.tolist(), of.path, strict=True)
        return {name: number for number, name in enumerate(names)}

    def pick(self, *kinds: Kind, phase: Phase | None = None) -> list[int]:
        """Numbers of all sites of these kinds, in `phase` (all for None), in the order they were first recorded."""
        wanted = {kind.value for kind in kinds}
        numbers = [
            number
            for number, kind in enumerate(self.sites.kind)
            if kind in wanted and (phase is None or self.sites.phase[number] == phase.value)
        ]
        return sorted(numbers, key=lambda number: int(self.order[number]))

    def rates(self) -> list[int]:
        """Sites of learning rates: hyper-parameters whose path ends in `['lr']`."""
        return [site for site in self.pick(Kind.HYPERPARAMETER) if self.path[site].endswith("['lr']")]

    def column(self, site: int) -> Column:
        """A site over the steps of `few` or `many`, whichever has it."""
        return (self.few if site in self.few.place else self.many).column(site)

    def name(self, site: int) -> str:
        """A site in words: `output GPT.h.0[0] call 1`, or `aten.mm in GPT.h.0 at model.py:41`."""
        call = f" call {self.call[site]}" if self.call[site] else ""
        if self.sites.op[site]:
            where = f" at {self.sites.source[site]}" if self.sites.source[site] else ""
            return f"{self.sites.op[site]} in {self.fqn[site]}{where}{call}"
        kind, fqn = self.sites.kind[site], self.fqn[site]
        return f"{kind if kind == fqn else f'{kind} {fqn}'}{self.path[site]}{call}"

    def hit(self, site: int, step: int, evidence: str) -> Hit:
        """A hit at a site, which is named as `name` has it; its rank is left at 0."""
        return Hit(int(step), self.name(site), evidence)

    def layout(self, site: int) -> Layout | None:
        """The layout of a site in the first kept step in which it was measured; None where it never was."""
        seen = self.column(site).layout
        seen = seen[seen >= 0]
        return self.reader.layouts[int(seen[0])] if len(seen) else None

    def tensors(self, *kinds: Kind, phase: Phase | None = None, floats: bool = True) -> list[int]:
        """As `pick`, of sites with more than one element; of floating point dtypes alone unless `floats` is False."""
        sites = []
        for site in self.pick(*kinds, phase=phase):
            layout = self.layout(site)
            if layout is not None and layout.numel > 1 and (not floats or layout.dtype.startswith(_FLOATS)):
                sites.append(site)
        return sites

    def norms(self, sites: Sequence[int]) -> NDArray[np.float64]:
        """float64 (T, n), L2 norms of the finite elements of sites in `many`; NaN where not measured."""
        places = [self.many.place[site] for site in sites]
        mean, var, bad = (self.many.floats[name][:, places].astype(np.float64) for name in ("mean", "var", "bad"))
        return l2_norm(mean, var, self.numel[self.many.layout[:, places]] * (1 - np.nan_to_num(bad)))

    def total_norm(self, sites: Sequence[int]) -> NDArray[np.float64]:
        """float64 (T,), L2 norm over the finite elements of all these sites, by step.

        NaNs and infinities are left out (see `norms`), as are sites that were not measured in a step.

        Args:
            sites: numbers of sites, each in `many`.
        """
        total: NDArray[np.float64] = np.sqrt(np.nansum(self.norms(sites) ** 2, axis=1))
        return total

    def stat(self, site: int, name: str) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Step numbers and values of one statistic at the steps where it is present."""
        steps, values = self.stats(site, name)
        return steps, values[0]

    def stats(self, site: int, *names: str) -> tuple[NDArray[np.int64], list[NDArray[np.float64]]]:
        """Step numbers, and values of several statistics, at the steps where all are present."""
        column = self.column(site)
        values = [column.floats[name].astype(np.float64) for name in names]
        rows = np.flatnonzero(~np.isnan(values).any(axis=0))
        return column.steps[rows], [value[rows] for value in values]


def first_rise(
    values: NDArray[np.float64], limit: Callable[[NDArray[np.float64]], float], least: int, most: int
) -> int | None:
    """First position whose value exceeds the limit that the values before it set; None where there is none.

    Args:
        values: one per step.
        limit: the limit, given the values before a position.
        least: how many values must stand before a position.
        most: how many of them `limit` is given at most: the last ones.
    """
    return next((at for at in range(least, len(values)) if values[at] > limit(values[max(0, at - most) : at])), None)


def lasting(flags: NDArray[np.bool_], least: int) -> int | None:
    """Start of the stretch of true flags that ends the array; None where it has fewer than `least` (1 or more)."""
    others = np.flatnonzero(~flags)
    start = int(others[-1]) + 1 if len(others) else 0
    return start if len(flags) - start >= least else None


MOST_CELLS = 6_000_000
"""Cells (steps by sites) kept of each statistic."""

_FEW = frozenset({Kind.LOSS.value, Kind.BATCH.value, Kind.HYPERPARAMETER.value})
_MEASURED = (Status.OBSERVED.value, Status.PARTIAL.value)
_NOT_FINITE = ("nans", "posinfs", "neginfs")


def read_table(reader: RankReader, most_cells: int = MOST_CELLS) -> Table:
    """Read all steps of a rank once, into a table.

    Losses, batches and hyper-parameters keep every step; other sites every `stride`-th, so that about `most_cells`
    cells or fewer are kept of each statistic. Moves of parameters, and the first non-finite record of each site, are
    from all steps.
    """
    sites, steps = reader.sites, reader.entries["step"].astype(np.int64)
    is_few = np.array([kind in _FEW for kind in sites.kind], np.bool_)
    stride = max(1, -(-len(steps) * int((~is_few).sum()) // most_cells))
    few, many = Columns.empty(steps, np.flatnonzero(is_few)), Columns.empty(steps[::stride], np.flatnonzero(~is_few))
    place = np.zeros(len(sites), np.int64)
    for columns in (few, many):
        place[columns.sites] = np.arange(len(columns.sites))
    numel = np.array([float(layout.numel) for layout in reader.layouts] or [0.0])
    order = np.full(len(sites), np.iinfo(np.int64).max, np.int64)
    nonfinite: dict[int, NonFinite] = {}
    moves = _MovesBuilder(reader, steps, numel)
    for row, step in enumerate(steps.tolist()):
        batch = reader.read(step)
        of_few = is_few[batch.site]
        _fill(few, row, batch, np.flatnonzero(of_few), place, numel)
        if row % stride == 0:
            _fill(many, row // stride, batch, np.flatnonzero(~of_few), place, numel)
        np.minimum.at(order, batch.site, batch.sequence.astype(np.int64))
        for event in _nonfinite(step, batch, numel):
            nonfinite.setdefault(event.site, event)
        moves.take(row, batch)
    return Table(
        reader=reader,
        stride=stride,
        order=order,
        few=few,
        many=many,
        moves=moves.moves,
        nonfinite=sorted(nonfinite.values(), key=lambda event: (event.step, event.sequence)),
    )


def _fill(
    columns: Columns,
    row: int,
    batch: StepBatch,
    rows: NDArray[np.int64],
    place: NDArray[np.int64],
    numel: NDArray[np.float64],
) -> None:
    """Fill row `row` of the columns with some records of a step.

    A plain value that is a number becomes its mean; of other plain values the checksum alone is kept.

    Args:
        columns: filled in place.
        row: position of the step in them.
        batch: the records of the step.
        rows: positions of the records in `batch`; their sites must be in `columns`.
        place: position of a site in its columns, by site number.
        numel: elements of a layout, by its number.
    """
    places, floats = place[batch.site[rows]], columns.floats
    measured = np.isin(batch.status[rows], _MEASURED)
    columns.layout[row, places[measured]] = batch.layout[rows[measured]]
    columns.checksum[row, places] = batch.checksum[rows]
    if batch.counts:
        with np.errstate(all="ignore"):
            for name in STATS:
                floats[name][row, places] = batch.floats[name][rows]
            size, zeros = numel[batch.layout[rows]], batch.counts["zeros"][rows]
            floats["zeros"][row, places] = np.where((zeros >= 0) & (size > 0), zeros / size, np.nan)
            bad, counted = sum(batch.counts[name][rows] for name in _NOT_FINITE), batch.counts["nans"][rows] >= 0
            floats["bad"][row, places] = np.where(counted & (size > 0), bad / size, np.nan)
    for position in np.flatnonzero(batch.status[rows] == Status.VALUE.value):
        with suppress(ValueError):  # most plain values are no numbers
            floats["mean"][row, places[position]] = float(batch.text[int(rows[position])])


def _nonfinite(step: int, batch: StepBatch, numel: NDArray[np.float64]) -> Iterator[NonFinite]:
    """Each record of a step with a NaN or infinity; none where no counts were recorded."""
    if batch.counts:
        counts = np.stack([batch.counts[name] for name in _NOT_FINITE], axis=1)
        for row in np.flatnonzero((counts > 0).any(axis=1)).tolist():
            nans, posinfs, neginfs = counts[row].tolist()
            at = step, int(batch.site[row]), int(batch.sequence[row])
            yield NonFinite(*at, nans, posinfs, neginfs, int(numel[batch.layout[row]]))


class _MovesBuilder:
    """Collects `Moves` step by step."""

    def __init__(self, reader: RankReader, steps: NDArray[np.int64], numel: NDArray[np.float64]) -> None:
        """Make `moves` with nothing observed; `take` fills it.

        Args:
            reader: the rank.
            steps: numbers of all its steps.
            numel: elements of a layout, by its number.
        """
        sites = reader.sites
        params = [number for number, kind in enumerate(sites.kind) if kind == Kind.PARAM.value]
        self._after = np.array([phase == Phase.OPTIMIZER.value for phase in sites.phase], np.bool_)
        # What no optimizer step leaves behind is not trained, and cannot be said to move.
        trained = sorted({sites.fqn[number] for number in params if self._after[number]})
        place = {fqn: number for number, fqn in enumerate(trained)}
        self._param = np.full(len(sites), -1, np.int64)
        for number in params:
            self._param[number] = place.get(sites.fqn[number], -1)
        shape = len(steps), len(trained)
        self.moves = Moves(steps, trained, np.full(shape, -1, np.int8), np.full(shape, np.nan, np.float32))
        self._numel = numel
        self._last_bits = np.zeros(len(trained), np.uint64)
        self._last_sketch: NDArray[np.float32] | None = None

    def take(self, row: int, batch: StepBatch) -> None:
        """Note in `moves` which trained parameters changed since they were seen last, after a step's optimizer.

        Checksums and sketches of parameters are kept for the next step. Passed over are untrained parameters, records
        without a checksum and, in `moves`, parameters without an earlier value. `row` is the step's position among all
        steps.
        """
        numbers = self._param[batch.site]
        if batch.sketch is not None and self._last_sketch is None:
            self._last_sketch = np.full((len(self.moves.names), batch.sketch.shape[1]), np.nan, np.float32)
        for after in (False, True):
            rows = np.flatnonzero((numbers >= 0) & (self._after[batch.site] == after) & (batch.checksum != 0))
            params, bits = numbers[rows], batch.checksum[rows]
            if after:
                seen = self._last_bits[params] != 0
                self.moves.changed[row, params[seen]] = (bits != self._last_bits[params])[seen]
                if self._last_sketch is not None and batch.sketch is not None and batch.counts:
                    with np.errstate(all="ignore"):
                        moved = np.linalg.norm(batch.sketch[rows] - self._last_sketch[params], axis=1)
                        left_out = sum(np.maximum(batch.counts[name][rows], 0) for name in _NOT_FINITE)
                        finite = self._numel[batch.layout[rows]] - left_out
                        size = l2_norm(batch.floats["mean"][rows], batch.floats["var"][rows], finite)
                        self.moves.relative[row, params] = np.where(size > 0, moved / size, np.nan)
            self._last_bits[params] = bits
            if self._last_sketch is not None and batch.sketch is not None:
                self._last_sketch[params] = batch.sketch[rows]
