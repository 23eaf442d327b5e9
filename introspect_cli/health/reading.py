"""Fills a rank's table in one pass over its steps."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from introspect_cli.health.table import MOST_CELLS, STATS, Columns, Moves, NonFinite, Table
from introspect_cli.records import Kind, Phase, Status
from introspect_cli.store.batch import l2_norm

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from introspect_cli.store.batch import StepBatch
    from introspect_cli.store.rank_reader import RankReader

_FEW = frozenset({Kind.LOSS.value, Kind.BATCH.value, Kind.HYPERPARAMETER.value})
_MEASURED = (Status.OBSERVED.value, Status.PARTIAL.value)


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
                    left_out = sum(np.maximum(batch.counts[name][rows], 0) for name in ("nans", "posinfs", "neginfs"))
                    size = l2_norm(mean, var, self.numel[batch.layout[rows]] - left_out)
                    self.relative[row, params] = np.where(size > 0, moved / size, np.nan)
        self._last_bits[params] = bits
        if self._last_sketch is not None and batch.sketch is not None:
            self._last_sketch[params] = batch.sketch[rows]


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
