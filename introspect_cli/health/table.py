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
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from introspect_cli.derived import l2_norm
from introspect_cli.health.findings import Hit
from introspect_cli.records import Kind, Layout, Phase, Status

if TYPE_CHECKING:
    import re
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import NDArray

    from introspect_cli.store.batch import StepBatch
    from introspect_cli.store.names import SiteTable
    from introspect_cli.store.reader import RankReader

STATS = ("min", "max", "mean", "amean", "var")
"""Statistics that are kept as they were recorded; a plain number is its mean."""

SHARES = ("zeros", "bad")
"""Statistics that are kept as shares of the elements: those that are exactly zero, those that are not finite."""

SiteName = tuple[str, str, str, int, str]
"""Phase, kind, FQN, call, path."""

FLOATS = ("float", "bfloat")
"""What floating point dtypes begin with."""

UNMEASURED = Layout((0,), "")


class NonFinite(NamedTuple):
    """The first time a site held a value that is not finite; `counts` are those of NaN, +Inf and -Inf."""

    step: int
    site: int
    sequence: int
    counts: tuple[int, ...]
    numel: int


class Columns(NamedTuple):
    """Some sites over some steps; of one site, see `column`, (T,) in place of (T, S).

    Attributes:
        steps: int64 (T,), step numbers.
        place: int64, by number of a site in the rank's table its column here; -1 for a site that has none.
        layout: int32 (T, S), number of the layout; -1 where nothing was measured.
        checksum: uint64 (T, S), 0 where not observed.
        floats: float32 (T, S) by name of `STATS` and `SHARES`, NaN where absent.
    """

    steps: NDArray[np.int64]
    place: NDArray[np.int64]
    layout: NDArray[np.int32]
    checksum: NDArray[np.uint64]
    floats: dict[str, NDArray[np.float32]]

    @classmethod
    def empty(cls, steps: NDArray[np.int64], chosen: NDArray[np.bool_]) -> Columns:
        """Columns of the chosen sites, to be filled: statistics NaN, layouts -1, checksums 0."""
        shape = len(steps), int(chosen.sum())
        floats = {name: np.full(shape, np.nan, np.float32) for name in (*STATS, *SHARES)}
        place = np.where(chosen, np.cumsum(chosen) - 1, -1)
        return cls(steps, place, np.full(shape, -1, np.int32), np.zeros(shape, np.uint64), floats)

    def column(self, site: int) -> Columns:
        """The column of one of its sites, as views of these arrays."""
        at = ..., self.place[site]
        floats = {name: values[at] for name, values in self.floats.items()}
        return Columns(self.steps, self.place, self.layout[at], self.checksum[at], floats)

    def fill(self, row: int, batch: StepBatch, numel: NDArray[np.float64]) -> None:
        """Fill row `row` with those records of a step whose sites have a column; `numel` is that of each layout.

        A plain value that is a number becomes its mean; of other plain values the checksum alone is kept.
        """
        rows = np.flatnonzero(self.place[batch.site] >= 0)
        places, floats = self.place[batch.site[rows]], self.floats
        measured = np.isin(batch.status[rows], _MEASURED)
        self.layout[row, places[measured]] = batch.layout[rows[measured]]
        self.checksum[row, places] = batch.checksum[rows]
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


class Moves:
    """Change of each trained parameter in every step, taken in step by step.

    Attributes:
        steps: int64 (T,), step numbers.
        names: FQN of each parameter.
        changed: int8 (T, P), 1 where the parameter's bits changed, 0 where not, -1 where it was not observed.
        relative: float32 (T, P), L2 length of the change over that of the parameter, NaN where unknown.
    """

    def __init__(self, sites: SiteTable, steps: NDArray[np.int64]) -> None:
        """Begin with nothing observed; `steps` are the numbers of all steps that `take` will be given."""
        params = [number for number, kind in enumerate(sites.kind) if kind == Kind.PARAM.value]
        self._after = np.array([phase == Phase.OPTIMIZER.value for phase in sites.phase], np.bool_)
        # What no optimizer step leaves behind is not trained, and cannot be said to move.
        self.steps, self.names = steps, sorted({sites.fqn[number] for number in params if self._after[number]})
        place = {fqn: number for number, fqn in enumerate(self.names)}
        self._param = np.full(len(sites), -1, np.int64)
        self._param[params] = [place.get(sites.fqn[number], -1) for number in params]
        shape = len(steps), len(self.names)
        self.changed, self.relative = np.full(shape, -1, np.int8), np.full(shape, np.nan, np.float32)
        self._last_bits = np.zeros(len(self.names), np.uint64)
        self._last_sketch: NDArray[np.float32] | None = None

    @cached_property
    def skipped(self) -> set[int]:
        """Steps with observed parameters in which none changed, as where a gradient scaler skips; asked at the end."""
        seen = (self.changed >= 0).any(axis=1)
        return set(self.steps[seen & ~(self.changed == 1).any(axis=1)].tolist())

    def take(self, row: int, batch: StepBatch, numel: NDArray[np.float64]) -> None:
        """Note which trained parameters changed since they were seen last, after a step's optimizer.

        Checksums and sketches of parameters are kept for the next step. Passed over are untrained parameters, records
        without a checksum, and parameters without an earlier value. `row` is the step's position among all steps,
        `numel` that of each layout.
        """
        numbers = self._param[batch.site]
        if batch.sketch is not None and self._last_sketch is None:
            self._last_sketch = np.full((len(self.names), batch.sketch.shape[1]), np.nan, np.float32)
        for after in (False, True):
            rows = np.flatnonzero((numbers >= 0) & (self._after[batch.site] == after) & (batch.checksum != 0))
            params, bits = numbers[rows], batch.checksum[rows]
            if after:
                seen = self._last_bits[params] != 0
                self.changed[row, params[seen]] = (bits != self._last_bits[params])[seen]
            self._last_bits[params] = bits
            if self._last_sketch is not None and batch.sketch is not None:
                if after and batch.counts:
                    with np.errstate(all="ignore"):
                        moved = np.linalg.norm(batch.sketch[rows] - self._last_sketch[params], axis=1)
                        left_out = sum(np.maximum(batch.counts[name][rows], 0) for name in _NOT_FINITE)
                        finite = numel[batch.layout[rows]] - left_out
                        size = l2_norm(batch.floats["mean"][rows], batch.floats["var"][rows], finite)
                        self.relative[row, params] = np.where(size > 0, moved / size, np.nan)
                self._last_sketch[params] = batch.sketch[rows]


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
        numel: float64, elements of each layout; the last entry, which -1 picks, is NaN.
        sites: all sites, by number; `fqn`, `call` and `path` are columns of it.
    """

    reader: RankReader
    stride: int
    order: NDArray[np.int64]
    few: Columns
    many: Columns
    moves: Moves
    nonfinite: list[NonFinite]
    numel: NDArray[np.float64]
    sites: SiteTable
    fqn: Sequence[str]
    call: NDArray[np.uint32]
    path: Sequence[str]

    def of_call(self, site: int, kind: Kind, path: str = "") -> int | None:
        """Number of the site of another kind, in its usual phase, of the same call; None where there is none."""
        return self.numbers.get((kind.phase or "", kind, self.fqn[site], int(self.call[site]), path))

    @cached_property
    def numbers(self) -> dict[SiteName, int]:
        """Number of each site by its name."""
        of = self.sites
        names = zip(of.phase, of.kind, of.fqn, of.call.tolist(), of.path, strict=True)
        return {name: number for number, name in enumerate(names)}

    def pick(self, *kinds: Kind, phase: Phase | None = None) -> list[int]:
        """Numbers of all sites of these kinds, in `phase` (all for None), in the order they were first recorded."""
        numbers = (number for number, kind in enumerate(self.sites.kind) if kind in kinds)
        chosen = (number for number in numbers if phase is None or self.sites.phase[number] == phase)
        return sorted(chosen, key=lambda number: int(self.order[number]))

    def rates(self) -> list[int]:
        """Sites of learning rates: hyper-parameters whose path ends in `['lr']`."""
        return [site for site in self.pick(Kind.HYPERPARAMETER) if self.path[site].endswith("['lr']")]

    def column(self, site: int) -> Columns:
        """A site over the steps of `few` or `many`, whichever has it."""
        return (self.few if self.few.place[site] >= 0 else self.many).column(site)

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

    def layout(self, site: int) -> Layout:
        """The layout of a site in the first kept step in which it was measured; `UNMEASURED` where it never was."""
        seen = self.column(site).layout
        seen = seen[seen >= 0]
        return self.reader.layouts[int(seen[0])] if len(seen) else UNMEASURED

    def tensors(self, *kinds: Kind, phase: Phase | None = None) -> list[int]:
        """As `pick`, of sites with more than one element of a floating point dtype."""
        layouts = {site: self.layout(site) for site in self.pick(*kinds, phase=phase)}
        return [site for site, layout in layouts.items() if layout.numel > 1 and layout.dtype.startswith(FLOATS)]

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
        return np.asarray(np.sqrt(np.nansum(self.norms(sites) ** 2, axis=1)))

    def stat(self, site: int, *names: str) -> tuple[NDArray[Any], ...]:
        """int64 step numbers, and float64 values of each of these statistics, at the steps where all are present."""
        column = self.column(site)
        values = np.array([column.floats[name] for name in names], np.float64)
        rows = np.flatnonzero(~np.isnan(values).any(axis=0))
        return column.steps[rows], *values[:, rows]


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


def adding_up(sites: SiteTable, summed: re.Pattern[str]) -> dict[int, list[int]]:
    """By number of a gradient, those of the output gradients whose elements add up to it, over all calls of its module.

    `summed` matches a parameter's name and its module's class, such as `bias of Linear`.
    """
    outputs: dict[str, list[int]] = {}
    for number, names in enumerate(zip(sites.kind, sites.phase, sites.path, strict=True)):
        if names == (Kind.GRAD_OUTPUT, Phase.BACKWARD, ""):
            outputs.setdefault(sites.fqn[number], []).append(number)
    adding = {}
    for number, (kind, fqn) in enumerate(zip(sites.kind, sites.fqn, strict=True)):
        owner, _, name = fqn.rpartition(".")
        calls = outputs.get(owner, []) if kind == Kind.GRAD else []
        if calls and summed.match(f"{name} of {sites.module_class[calls[0]]}"):
            adding[number] = calls
    return adding


MOST_CELLS = 6_000_000
"""Cells (steps by sites) kept of each statistic."""

_FEW = frozenset({Kind.LOSS.value, Kind.BATCH.value, Kind.HYPERPARAMETER.value})
_MEASURED = (Status.OBSERVED.value, Status.PARTIAL.value)
_NOT_FINITE = ("nans", "posinfs", "neginfs")


def read_table(reader: RankReader) -> Table:
    """Read all steps of a rank once, into a table.

    Losses, batches and hyper-parameters keep every step; other sites every `stride`-th, so that about `MOST_CELLS`
    cells or fewer are kept of each statistic. Moves of parameters, and the first non-finite record of each site, are
    from all steps.
    """
    sites, steps = reader.sites, reader.entries["step"].astype(np.int64)
    is_few = np.array([kind in _FEW for kind in sites.kind], np.bool_)
    stride = max(1, -(-len(steps) * int((~is_few).sum()) // MOST_CELLS))
    few, many = Columns.empty(steps, is_few), Columns.empty(steps[::stride], ~is_few)
    numel = np.array([*(float(layout.numel) for layout in reader.layouts), np.nan])
    order = np.full(len(sites), np.iinfo(np.int64).max, np.int64)
    events: dict[int, NonFinite] = {}
    moves = Moves(sites, steps)
    for row, step in enumerate(steps.tolist()):
        batch = reader.read(step)
        few.fill(row, batch, numel)
        if row % stride == 0:
            many.fill(row // stride, batch, numel)
        np.minimum.at(order, batch.site, batch.sequence.astype(np.int64))
        for event in _nonfinite(step, batch, numel):
            events.setdefault(event.site, event)
        moves.take(row, batch, numel)
    nonfinite = sorted(events.values(), key=lambda event: (event.step, event.sequence))
    names = sites, sites.fqn, sites.call, sites.path
    return Table(reader, stride, order, few, many, moves, nonfinite, numel, *names)


def _nonfinite(step: int, batch: StepBatch, numel: NDArray[np.float64]) -> Iterator[NonFinite]:
    """Each record of a step with a NaN or infinity; none where no counts were recorded."""
    if batch.counts:
        counts = np.stack([batch.counts[name] for name in _NOT_FINITE], axis=1)
        for row in np.flatnonzero((counts > 0).any(axis=1)).tolist():
            at, size = (int(batch.site[row]), int(batch.sequence[row])), int(numel[batch.layout[row]])
            yield NonFinite(step, *at, tuple(counts[row].tolist()), size)
