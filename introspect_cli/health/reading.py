"""Fills a rank's table in one pass over its steps."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

import numpy as np

from introspect_cli.health.table import STATS, Columns, Moves, NonFinite, Table
from introspect_cli.records import Kind, Phase, Status
from introspect_cli.store.read.step_reader import l2_norm

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from introspect_cli.store.format.batch import StepBatch
    from introspect_cli.store.read.rank_reader import RankReader

MOST_CELLS = 6_000_000
"""Cells (steps by sites) kept of each statistic."""

_FEW = frozenset({Kind.LOSS.value, Kind.BATCH.value, Kind.HYPERPARAMETER.value})
_MEASURED = (Status.OBSERVED.value, Status.PARTIAL.value)
_NOT_FINITE = ("nans", "posinfs", "neginfs")


def read_table(reader: RankReader, most_cells: int = MOST_CELLS) -> Table:
    """Read all steps of a rank once."""
    builder = TableBuilder(reader, most_cells)
    for step in reader.entries["step"].tolist():
        builder.take(step, reader.read(step))
    return builder.table()


class TableBuilder:
    """A rank's table in the making: takes in its steps one after the other."""

    def __init__(self, reader: RankReader, most_cells: int = MOST_CELLS) -> None:
        """Make room for all steps of a rank."""
        self._reader, sites = reader, reader.sites
        steps = reader.entries["step"].astype(np.int64)
        self._is_few = np.array([kind in _FEW for kind in sites.kind], np.bool_)
        few, many = np.flatnonzero(self._is_few), np.flatnonzero(~self._is_few)
        self._stride = max(1, -(-len(steps) * len(many) // most_cells))
        self._few, self._many = Columns.empty(steps, few), Columns.empty(steps[:: self._stride], many)
        self._place = np.zeros(len(sites), np.int64)
        for columns in (self._few, self._many):
            self._place[columns.sites] = np.arange(len(columns.sites))
        self._numel = np.array([float(layout.numel) for layout in reader.layouts] or [0.0])
        self._order = np.full(len(sites), np.iinfo(np.int64).max, np.int64)
        self._nonfinite: list[NonFinite] = []
        self._was_bad = np.zeros(len(sites), np.bool_)
        self._moves = _MovesBuilder(reader, steps, self._numel)
        self._row = 0

    def take(self, step: int, batch: StepBatch) -> None:
        """Take in the next step."""
        row, few = self._row, self._is_few[batch.site]
        self._row += 1
        self._fill(self._few, row, batch, np.flatnonzero(few))
        if row % self._stride == 0:
            self._fill(self._many, row // self._stride, batch, np.flatnonzero(~few))
        np.minimum.at(self._order, batch.site, batch.sequence.astype(np.int64))
        if batch.counts:
            self._note_nonfinite(step, batch)
        self._moves.take(row, batch)

    def table(self) -> Table:
        """The table of all steps that were taken in."""
        sites = self._reader.sites
        return Table(
            rank=self._reader.rank,
            stride=self._stride,
            phase=sites.phase,
            kind=sites.kind,
            fqn=sites.fqn,
            call=sites.call.tolist(),
            path=sites.path,
            module_class=sites.module_class,
            op=sites.op,
            source=sites.source,
            order=self._order,
            layouts=self._reader.layouts,
            modules=self._reader.modules,
            few=self._few,
            many=self._many,
            moves=self._moves.moves,
            nonfinite=sorted(self._nonfinite, key=lambda event: (event.step, event.sequence)),
        )

    def _fill(self, columns: Columns, row: int, batch: StepBatch, rows: NDArray[np.int64]) -> None:
        places = self._place[batch.site[rows]]
        measured = np.isin(batch.status[rows], _MEASURED)
        columns.layout[row, places[measured]] = batch.layout[rows[measured]]
        columns.checksum[row, places] = batch.checksum[rows]
        floats = columns.floats
        if batch.counts:
            with np.errstate(all="ignore"):
                for name in STATS:
                    floats[name][row, places] = batch.floats[name][rows]
                numel, zeros = self._numel[batch.layout[rows]], batch.counts["zeros"][rows]
                floats["zeros"][row, places] = np.where((zeros >= 0) & (numel > 0), zeros / numel, np.nan)
                bad = sum(batch.counts[name][rows] for name in _NOT_FINITE)
                counted = batch.counts["nans"][rows] >= 0
                floats["bad"][row, places] = np.where(counted & (numel > 0), bad / numel, np.nan)
        for position in np.flatnonzero(batch.status[rows] == Status.VALUE.value):
            with suppress(ValueError):  # most plain values are no numbers
                floats["mean"][row, places[position]] = float(batch.text[int(rows[position])])

    def _note_nonfinite(self, step: int, batch: StepBatch) -> None:
        counts = batch.counts
        bad = (counts["nans"] > 0) | (counts["posinfs"] > 0) | (counts["neginfs"] > 0)
        for position in np.flatnonzero(bad & ~self._was_bad[batch.site]):
            site = int(batch.site[position])
            self._was_bad[site] = True
            nans, posinfs, neginfs = (int(counts[name][position]) for name in _NOT_FINITE)
            numel = int(self._numel[batch.layout[position]])
            self._nonfinite.append(NonFinite(step, site, int(batch.sequence[position]), nans, posinfs, neginfs, numel))


class _MovesBuilder:
    """How parameters move, from one step to the next."""

    def __init__(self, reader: RankReader, steps: NDArray[np.int64], numel: NDArray[np.float64]) -> None:
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
        """Compare the parameters after a step's optimizer with those that were last seen."""
        if self.moves.names:
            self._see(row, batch, after=False)
            self._see(row, batch, after=True)

    def _see(self, row: int, batch: StepBatch, *, after: bool) -> None:
        numbers = self._param[batch.site]
        rows = np.flatnonzero((numbers >= 0) & (self._after[batch.site] == after) & (batch.checksum != 0))
        if not len(rows):
            return
        params, bits = numbers[rows], batch.checksum[rows]
        if batch.sketch is not None and self._last_sketch is None:
            self._last_sketch = np.full((len(self.moves.names), batch.sketch.shape[1]), np.nan, np.float32)
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
