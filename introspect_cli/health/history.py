"""Statistics of sites over time, packed small enough to be mailed.

A page that shows the statistics of any site of two runs cannot hold a thousand steps of ten thousand sites. So values
stand as they were recorded, in float32, never requantised. Sites that say most come first and keep every step; when
most of the room is used, the next ones keep some steps, the one that matters among them; what still finds no room is
left out, and the page says how much. A series that is constant, or that the second run shares with the first, takes no
room.

Whether two records are equal is told by their checksums, step by step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from introspect_cli.records import Kind

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from introspect_cli.health.table import Columns, Table

STATS = ("mean", "std", "absmax", "bad")
"""Statistics that are packed; the L2 norm follows from them."""

BUDGET = 3_200_000
"""Bytes of all series before they are compressed."""

MOST_POINTS = 2000
COARSE_POINTS = 48
_WHOLE_SHARE = 0.6  # of the budget, for sites that keep every step

_ORDER = (
    Kind.LOSS,
    Kind.HYPERPARAMETER,
    Kind.OUTPUT,
    Kind.GRAD,
    Kind.PARAM,
    Kind.GRAD_OUTPUT,
    Kind.BATCH,
    Kind.INPUT,
    Kind.GRAD_INPUT,
    Kind.BUFFER,
    Kind.OPTIMIZER_STATE,
)

UNKNOWN, EQUAL, DIFFERS, ONLY_A, ONLY_B = range(5)
"""How a record of a and its partner in b compare, by their checksums; unknown where one was not observed."""

_RANK = {kind.value: place for place, kind in enumerate(_ORDER)}

SiteName = tuple[str, str, str, int, str]
"""Phase, kind, FQN, call, path."""

Series = dict[str, tuple["int | float", ...]]
"""By statistic, for each run: the number of a row (int, -1 for none), or the value that never changes (float)."""


@dataclass(frozen=True, eq=False)
class Rows:
    """Series of some sites over the same steps.

    Attributes:
        steps: int64 (P,), the steps that are kept.
        values: float32 (n, P), NaN where there is no value.
        states: uint8 (sites, P), how a and b compare; empty for a single run.
    """

    steps: NDArray[np.int64]
    values: NDArray[np.float32]
    states: NDArray[np.uint8]


@dataclass(frozen=True, eq=False)
class Packed:
    """Series of many sites.

    Attributes:
        sites: name of each site; the first `whole` keep every step.
        about: module class, dtype, shape and numel of each site.
        series: of each site, rows of its part.
        whole: how many sites are in the first part.
        parts: every kept step, and some of them.
        total: sites there were.
        steps: steps there were.
    """

    sites: tuple[SiteName, ...]
    about: tuple[tuple[str, str, tuple[int, ...], int], ...]
    series: tuple[Series, ...]
    whole: int
    parts: tuple[Rows, Rows]
    total: int
    steps: int


class _Part:
    """One part in the making."""

    def __init__(self, tables: Sequence[Table], shifts: Sequence[int], steps: NDArray[np.int64]) -> None:
        self.steps = steps
        self.windows = [_Kept(table, steps - shift) for table, shift in zip(tables, shifts, strict=True)]
        self.rows: list[NDArray[np.float32]] = []
        self.states: list[NDArray[np.uint8]] = []

    def take(self, runs: dict[int, int]) -> tuple[Series, list[NDArray[np.float32]]]:
        """The series of a site and the rows they need; `keep` makes the rows part of this."""
        found: Series = {}
        rows: list[NDArray[np.float32]] = []
        for stat in STATS:
            entries: list[int | float] = []
            own: dict[bytes, int] = {}
            for run, window in enumerate(self.windows):
                values = window.get(runs[run], stat) if run in runs else None
                if values is None or np.isnan(values).all():
                    entries.append(-1)
                elif (values == values[0]).all():
                    entries.append(float(f"{values[0]:.9g}"))
                else:
                    number = own.setdefault(values.tobytes(), len(self.rows) + len(rows))
                    if number == len(self.rows) + len(rows):
                        rows.append(values)
                    entries.append(number)
            if any(entry != -1 or isinstance(entry, float) for entry in entries):
                found[stat] = tuple(entries)
        return found, rows

    def keep(self, runs: dict[int, int], rows: list[NDArray[np.float32]], *, compared: bool) -> None:
        self.rows += rows
        if compared:
            bits = [window.checksums(runs[run]) if run in runs else None for run, window in enumerate(self.windows[:2])]
            self.states.append(_states(bits[0], bits[1], len(self.steps)))

    def result(self) -> Rows:
        points = len(self.steps)
        values = np.stack(self.rows) if self.rows else np.zeros((0, points), np.float32)
        return Rows(self.steps, values, np.stack(self.states) if self.states else np.zeros((0, points), np.uint8))


def pack(
    tables: Sequence[Table],
    keep_step: int | None = None,
    shifts: Sequence[int] = (),
    budget: int = BUDGET,
    *,
    compared: bool = False,
) -> Packed:
    """Pack the histories of runs that are compared: the first is a, then b, then noise runs.

    Args:
        tables: one rank of each run.
        keep_step: a step that must stay.
        shifts: what is added to the step numbers of each run; 0 where there are fewer.
        budget: bytes of all series.
        compared: whether the second run is b; else there is none.
    """
    shifts = [*shifts, *[0] * (len(tables) - len(shifts))]
    found: dict[SiteName, dict[int, int]] = {}
    for run, table in enumerate(tables):
        for number in range(len(table.kind)):
            if table.kind[number] != Kind.RNG.value:
                name = (
                    table.phase[number],
                    table.kind[number],
                    table.fqn[number],
                    table.call[number],
                    table.path[number],
                )
                found.setdefault(name, {})[run] = number
    names = sorted(filter(_is_told, found), key=lambda name: (_RANK.get(name[1], len(_RANK)), name[3] > 0))
    every = np.unique(np.concatenate([_steps(table) + shift for table, shift in zip(tables, shifts, strict=True)]))
    kept = _thinned(every, MOST_POINTS, keep_step)
    parts = _Part(tables, shifts, kept), _Part(tables, shifts, _thinned(kept, COARSE_POINTS, keep_step))
    used, whole = 0, None
    sites: list[SiteName] = []
    series: list[Series] = []
    with np.errstate(all="ignore"):  # a store from a stranger may hold a negative variance
        for name in names:
            own = found[name]
            if whole is None:
                entry, rows = parts[0].take(own)
                if used + sum(row.nbytes for row in rows) > _WHOLE_SHARE * budget:
                    whole = len(sites)
            if whole is not None:
                entry, rows = parts[1].take(own)
            used += sum(row.nbytes for row in rows)
            if used > budget and sites:
                break
            parts[whole is not None].keep(own, rows, compared=compared)
            sites.append(name)
            series.append(entry)
    about = []
    for name in sites:
        run, number = next(iter(found[name].items()))
        layout = tables[run].layout(number)
        described = (layout.dtype, layout.shape, layout.numel) if layout else ("", (), 0)
        about.append((tables[run].module_class[number], *described))
    return Packed(
        sites=tuple(sites),
        about=tuple(about),
        series=tuple(series),
        whole=len(sites) if whole is None else whole,
        parts=(parts[0].result(), parts[1].result()),
        total=len(names),
        steps=len(every),
    )


def _states(a: NDArray[np.uint64] | None, b: NDArray[np.uint64] | None, steps: int) -> NDArray[np.uint8]:
    """How a site compares at each kept step, from its checksums in a and b; None where a run has no such site."""
    if a is None or b is None:
        own, other = (a, ONLY_A) if a is not None else (b, ONLY_B)
        return np.where(own != 0, other, UNKNOWN).astype(np.uint8) if own is not None else np.zeros(steps, np.uint8)
    seen = (a != 0) & (b != 0)
    return np.select([seen & (a == b), seen], [EQUAL, DIFFERS], UNKNOWN).astype(np.uint8)


def _is_told(name: SiteName) -> bool:
    """Whether a site has a history; of hyper-parameters the learning rate has, operators have a table of their own."""
    return name[1] != Kind.OP_OUTPUT.value and (name[1] != Kind.HYPERPARAMETER.value or name[4].endswith("['lr']"))


def _steps(table: Table) -> NDArray[np.int64]:
    return table.many.steps if len(table.many.steps) else table.few.steps


def _thinned(every: NDArray[np.int64], points: int, keep: int | None) -> NDArray[np.int64]:
    if not len(every):
        return every
    places = np.unique(np.linspace(0, len(every) - 1, min(points, len(every))).round().astype(np.int64))
    picked: NDArray[np.int64] = every[places]
    if keep is not None and keep in every:
        return np.union1d(picked, np.array([keep], np.int64))
    return picked


class _Kept:
    """Where the kept steps lie in a table."""

    def __init__(self, table: Table, steps: NDArray[np.int64]) -> None:
        self.table = table
        self.length = len(steps)
        self._of = {id(columns): self._rows(columns, steps) for columns in (table.few, table.many)}

    @staticmethod
    def _rows(columns: Columns, steps: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        if not len(columns.steps):
            return np.zeros(0, np.int64), np.zeros(0, np.int64)
        rows = np.searchsorted(columns.steps, steps)
        there = np.flatnonzero(
            (rows < len(columns.steps)) & (columns.steps[np.minimum(rows, len(columns.steps) - 1)] == steps)
        )
        return there, rows[there]

    def get(self, number: int, stat: str) -> NDArray[np.float32]:
        """A statistic at the kept steps as it was recorded, NaN where absent."""
        columns, place = self.table.columns(number)
        there, rows = self._of[id(columns)]
        out = np.full(self.length, np.nan, np.float32)
        if not len(rows):
            return out
        own = {name: column[rows, place] for name, column in columns.floats.items()}
        if stat == "std":
            out[there] = np.sqrt(own["var"].astype(np.float64))
        elif stat == "absmax":
            out[there] = np.maximum(np.abs(own["min"]), np.abs(own["max"]))
        else:
            out[there] = columns.bad[rows, place] if stat == "bad" else own[stat]
        return out

    def checksums(self, number: int) -> NDArray[np.uint64]:
        """A site's checksums at the kept steps, 0 where it was not observed."""
        columns, place = self.table.columns(number)
        there, rows = self._of[id(columns)]
        out = np.zeros(self.length, np.uint64)
        out[there] = columns.checksum[rows, place]
        return out


@dataclass(frozen=True)
class Depth:
    """How large values are along the depth of a model, over all steps.

    Attributes:
        names: modules in execution order.
        low: 10th percentile over the steps of the root mean square of each.
        middle: median.
        high: 90th percentile.
        dtypes: dtype of each.
        total: modules there were; every k-th is kept where there are very many.
    """

    names: tuple[str, ...]
    low: tuple[float, ...]
    middle: tuple[float, ...]
    high: tuple[float, ...]
    dtypes: tuple[str, ...] = ()
    total: int = 0


def depth(table: Table, kind: Kind, most: int = 300) -> Depth:
    """Scales of outputs (`Kind.OUTPUT`) or of the gradients at them (`Kind.GRAD_OUTPUT`), first call of each module."""
    order = {
        (table.fqn[site], table.path[site]): place
        for place, site in enumerate(table.pick(Kind.OUTPUT))
        if not table.call[site]
    }
    sites = [site for site in table.pick(kind) if not table.call[site] and (table.fqn[site], table.path[site]) in order]
    sites.sort(key=lambda site: order[table.fqn[site], table.path[site]])
    rows = []
    for site in sites[:: max(1, -(-len(sites) // most))]:
        with np.errstate(all="ignore"):
            steps, norm = table.l2(site)
        layout = table.layout(site)
        if layout is None or not layout.numel or not len(steps):
            continue
        scale = norm[np.isfinite(norm)] / layout.numel**0.5
        if len(scale) and layout.dtype.startswith(("float", "bfloat")):
            low, middle, high = np.quantile(scale, [0.1, 0.5, 0.9])
            rows.append((f"{table.fqn[site]}{table.path[site]}", float(low), float(middle), float(high), layout.dtype))
    if not rows:
        return Depth((), (), (), ())
    names, low, middle, high, dtypes = zip(*rows, strict=True)
    return Depth(names, low, middle, high, dtypes, len(sites))
