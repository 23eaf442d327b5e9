"""Statistics over time: curves of losses, norms and rates; scales along the depth of a model; sites packed for a page.

A page that shows the statistics of any site of two runs cannot hold a thousand steps of ten thousand sites. So values
stand as they were recorded, in float32, never requantised. Sites that say most come first and keep every step; when
most of the room is used, the next ones keep some steps, the one that matters among them; what still finds no room is
left out, and the page says how much. A series that is constant, or that the second run shares with the first, takes no
room.

Whether two records are equal, their checksums say, step by step.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from introspect_cli.records import Kind

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from introspect_cli.health.table import SiteName, Table

STATS = ("mean", "std", "absmax", "bad")
"""Statistics that are packed; the L2 norm follows from them."""

BUDGET = 3_200_000
"""Bytes of all series before they are compressed."""

MOST_POINTS = 2000
COARSE_POINTS = 48
_WHOLE_SHARE = 0.6  # of the budget, for sites that keep every step

_FIRST = (
    *(Kind.LOSS, Kind.HYPERPARAMETER, Kind.OUTPUT, Kind.GRAD, Kind.PARAM, Kind.GRAD_OUTPUT),
    *(Kind.BATCH, Kind.INPUT, Kind.GRAD_INPUT, Kind.BUFFER, Kind.OPTIMIZER_STATE),
)
_WITHOUT = (Kind.RNG, Kind.OP_OUTPUT)  # operators have another table
_ORDER = {kind.value: place for place, kind in enumerate(dict.fromkeys([*_FIRST, *Kind])) if kind not in _WITHOUT}
_LAST = len(_FIRST)

UNKNOWN, EQUAL, DIFFERS, ONLY_A, ONLY_B = range(5)
"""How a record of a and its partner in b compare, by their checksums; unknown where one was not observed."""

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
        self.windows = [_Window(table, steps - shift) for table, shift in zip(tables, shifts, strict=True)]
        self.rows: list[NDArray[np.float32]] = []
        self.states: list[NDArray[np.uint8]] = []

    def take(self, runs: dict[int, int]) -> tuple[Series, list[NDArray[np.float32]]]:
        """The series of a site and the rows they need; `keep` makes the rows part of this."""
        series: Series = {}
        rows: list[NDArray[np.float32]] = []
        for stat in STATS:
            entries: list[int | float] = []
            numbers: dict[bytes, int] = {}
            for run, window in enumerate(self.windows):
                values = window.get(runs[run], stat) if run in runs else None
                if values is None or np.isnan(values).all():
                    entries.append(-1)
                elif (values == values[0]).all():
                    entries.append(float(f"{values[0]:.9g}"))
                else:
                    fresh = len(self.rows) + len(rows)
                    entries.append(numbers.setdefault(values.tobytes(), fresh))
                    if entries[-1] == fresh:
                        rows.append(values)
            if any(entry != -1 or isinstance(entry, float) for entry in entries):
                series[stat] = tuple(entries)
        return series, rows

    def keep(self, runs: dict[int, int], rows: list[NDArray[np.float32]], *, compared: bool) -> None:
        self.rows += rows
        if compared:
            bits = [window.checksums(runs[run]) if run in runs else None for run, window in enumerate(self.windows[:2])]
            self.states.append(_states(bits[0], bits[1], len(self.steps)))

    def result(self) -> Rows:
        none = 0, len(self.steps)
        values = np.stack(self.rows) if self.rows else np.zeros(none, np.float32)
        return Rows(self.steps, values, np.stack(self.states) if self.states else np.zeros(none, np.uint8))


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
    by_name: dict[SiteName, dict[int, int]] = {}
    for run, table in enumerate(tables):
        for name, number in table.numbers.items():
            if name[1] in _ORDER and (name[1] != Kind.HYPERPARAMETER.value or name[4].endswith("['lr']")):
                by_name.setdefault(name, {})[run] = number
    names = sorted(by_name, key=lambda name: (min(_ORDER[name[1]], _LAST), name[3] > 0))
    steps = [table.many.steps if len(table.many.steps) else table.few.steps for table in tables]
    every = np.unique(np.concatenate([of_run + shift for of_run, shift in zip(steps, shifts, strict=True)]))
    kept = _thinned(every, MOST_POINTS, keep_step)
    parts = _Part(tables, shifts, kept), _Part(tables, shifts, _thinned(kept, COARSE_POINTS, keep_step))
    used, whole = 0, None
    sites: list[SiteName] = []
    series: list[Series] = []
    with np.errstate(all="ignore"):  # a store from a stranger may hold a negative variance
        for name in names:
            numbers = by_name[name]
            if whole is None:
                entry, rows = parts[0].take(numbers)
                if used + sum(row.nbytes for row in rows) > _WHOLE_SHARE * budget:
                    whole = len(sites)
            if whole is not None:
                entry, rows = parts[1].take(numbers)
            used += sum(row.nbytes for row in rows)
            if used > budget and sites:
                break
            parts[whole is not None].keep(numbers, rows, compared=compared)
            sites.append(name)
            series.append(entry)
    about = []
    for name in sites:
        run, number = next(iter(by_name[name].items()))
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
        seen_in, checksums = (ONLY_A, a) if a is not None else (ONLY_B, b)
        return np.where((np.zeros(steps) if checksums is None else checksums) != 0, seen_in, UNKNOWN).astype(np.uint8)
    seen = (a != 0) & (b != 0)
    return np.select([seen & (a == b), seen], [EQUAL, DIFFERS], UNKNOWN).astype(np.uint8)


def _thinned(every: NDArray[np.int64], points: int, keep: int | None) -> NDArray[np.int64]:
    if not len(every):
        return every
    places = np.unique(np.linspace(0, len(every) - 1, min(points, len(every))).round().astype(np.int64))
    picked: NDArray[np.int64] = every[places]
    if keep is not None and keep in every:
        return np.union1d(picked, np.array([keep], np.int64))
    return picked


class _Window:
    """The kept steps of one table."""

    def __init__(self, table: Table, steps: NDArray[np.int64]) -> None:
        self._table, self._length = table, len(steps)
        # Of sites that keep some steps, and of those that keep all: where the kept steps lie in both.
        self._common = [
            np.intersect1d(steps, columns.steps, return_indices=True)[1:] for columns in (table.many, table.few)
        ]

    def get(self, number: int, stat: str) -> NDArray[np.float32]:
        """A statistic at the kept steps as it was recorded, NaN where absent."""
        floats = self._table.column(number).floats
        if stat == "std":
            return self._at(number, np.sqrt(floats["var"].astype(np.float64)).astype(np.float32), np.nan)
        if stat == "absmax":
            return self._at(number, np.maximum(np.abs(floats["min"]), np.abs(floats["max"])), np.nan)
        return self._at(number, floats[stat], np.nan)

    def checksums(self, number: int) -> NDArray[np.uint64]:
        """A site's checksums at the kept steps, 0 where it was not observed."""
        return self._at(number, self._table.column(number).checksum, 0)

    def _at(self, number: int, values: NDArray[Any], absent: float) -> NDArray[Any]:
        there, rows = self._common[number in self._table.few.place]
        out = np.full(self._length, absent, values.dtype)
        out[there] = values[rows]
        return out


# --- curves

_MOST = 4  # of a kind; a script with more losses than that has a history for each


@dataclass(frozen=True, eq=False)
class Curve:
    """One number a step.

    Attributes:
        name: what it is.
        kind: `loss`, `gradients` or `learning rate`.
        steps: int64 (T,).
        values: float64 (T,); not finite where the run's value was not.
    """

    name: str
    kind: str
    steps: NDArray[np.int64]
    values: NDArray[np.float64]


def curves(table: Table, shift: int = 0) -> tuple[Curve, ...]:
    """The curves of a rank that there are, the first loss first; `shift` is added to its step numbers."""
    made = []
    for site in table.pick(Kind.LOSS)[:_MOST]:
        call = f" of backward {table.call[site]}" if table.call[site] else ""
        path = f" {table.path[site]}" if table.path[site] else ""
        made.append(_curve(table, site, "loss", f"loss{call}{path}"))
    norm = _gradient_norm(table)
    rates = [site for site in table.pick(Kind.HYPERPARAMETER) if table.path[site].endswith("['lr']")]
    for site in rates[:_MOST]:
        group = table.path[site].removesuffix("['lr']")
        made.append(_curve(table, site, "learning rate", f"learning rate of {table.fqn[site]} {group}".rstrip()))
    ordered = (*made[:1], *([norm] if norm else []), *made[1:])
    return tuple(replace(curve, steps=curve.steps + shift) for curve in ordered if len(curve.steps))


def _curve(table: Table, site: int, kind: str, name: str) -> Curve:
    """A site's mean, which is the value of a number; NaN where the value is recorded as not finite."""
    column = table.column(site)
    rows = np.flatnonzero((column.layout >= 0) | ~np.isnan(column.floats["mean"]))
    values = column.floats["mean"][rows].astype(np.float64)
    values[np.nan_to_num(column.floats["bad"][rows]) > 0] = np.nan
    return Curve(name, kind, column.steps[rows], values)


def _gradient_norm(table: Table) -> Curve | None:
    """L2 norm over the gradients of all recorded parameters, at their last backward pass in each step."""
    last: dict[str, int] = {}
    for site in sorted(table.pick(Kind.GRAD), key=lambda site: table.call[site]):
        last[table.fqn[site]] = site
    sites = list(last.values())
    if not sites:
        return None
    with np.errstate(all="ignore"):
        norms, total = table.norms(sites), table.total_norm(sites)
    bad = np.stack([table.column(site).floats["bad"] > 0 for site in sites], axis=1).any(axis=1)
    total[bad] = np.nan
    seen = np.isfinite(norms).any(axis=1) | bad
    return Curve("L2 norm of all recorded gradients", "gradients", table.many.steps[seen], total[seen])


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
    outputs = [site for site in table.pick(Kind.OUTPUT) if not table.call[site]]
    order = {(table.fqn[site], table.path[site]): place for place, site in enumerate(outputs)}
    sites = [site for site in table.pick(kind) if not table.call[site] and (table.fqn[site], table.path[site]) in order]
    sites.sort(key=lambda site: order[table.fqn[site], table.path[site]])
    rows = []
    for site in sites[:: max(1, -(-len(sites) // most))]:
        with np.errstate(all="ignore"):
            norm = table.norms([site])[:, 0]
        layout = table.layout(site)
        if layout is None or not layout.numel:
            continue
        scale = norm[np.isfinite(norm)] / layout.numel**0.5
        if len(scale) and layout.dtype.startswith(("float", "bfloat")):
            low, middle, high = np.quantile(scale, [0.1, 0.5, 0.9])
            rows.append((f"{table.fqn[site]}{table.path[site]}", float(low), float(middle), float(high), layout.dtype))
    if not rows:
        return Depth((), (), (), ())
    names, low, middle, high, dtypes = zip(*rows, strict=True)
    return Depth(names, low, middle, high, dtypes, len(sites))
