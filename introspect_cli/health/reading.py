"""Fills a rank's table in one pass over its steps."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

import numpy as np

from introspect_cli.health.table import STATS, Columns, Moves, NonFinite, Table
from introspect_cli.records import Kind, Phase, Status
from introspect_cli.store.reader import l2_norm

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from introspect_cli.store.batch import StepBatch
    from introspect_cli.store.reader import RankReader

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
        rank=reader.rank,
        stride=stride,
        phase=sites.phase,
        kind=sites.kind,
        fqn=sites.fqn,
        call=sites.call.tolist(),
        path=sites.path,
        module_class=sites.module_class,
        op=sites.op,
        source=sites.source,
        order=order,
        layouts=reader.layouts,
        modules=reader.modules,
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

        `row` is the step's position among all steps.
        """
        if self.moves.names:
            self._note_parameters(row, batch, after=False)
            self._note_parameters(row, batch, after=True)

    def _note_parameters(self, row: int, batch: StepBatch, *, after: bool) -> None:
        """Keep checksums and sketches of parameters before (or `after`) the optimizer; `after`, fill `moves` as well.

        Passed over are untrained parameters, records without a checksum and, in `moves`, parameters without an earlier
        value.
        """
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
