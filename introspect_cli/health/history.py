"""Statistics over time: curves of losses, norms and rates; scales along the depth of a model; sites packed for a page.

A page that shows the statistics of any site of two runs cannot hold a thousand steps of ten thousand sites. So values
stand as they were recorded, in float32, never requantised, at as many steps as all sites have room for, the one that
matters among them. Sites that say most come first; what finds no room is left out, and the page says how much. A series
that is constant, or that the second run shares with the first, takes no room.

Whether two records are equal, their checksums say, step by step.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from introspect_cli.health.table import FLOATS, UNMEASURED
from introspect_cli.records import Kind

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from introspect_cli.health.table import SiteName, Table

_SERIES: dict[str, Callable[[dict[str, NDArray[np.float32]]], NDArray[np.float32]]] = {
    "mean": lambda floats: floats["mean"],
    "std": lambda floats: np.sqrt(floats["var"].astype(np.float64)).astype(np.float32),
    "absmax": lambda floats: np.maximum(np.abs(floats["min"]), np.abs(floats["max"])),
    "bad": lambda floats: floats["bad"],
}
"""Statistics that are packed; the L2 norm follows from them."""

BUDGET = 3_200_000
"""Bytes of all series before they are compressed."""

_BYTES = 4  # of a value
MOST_POINTS, LEAST_POINTS = 2000, 48
"""Steps that are kept of each site: as many of the run's as all sites have room for, within these bounds."""

_ORDER = (
    *("loss", "hyperparameter", "output", "grad", "param", "grad_output"),
    *("batch", "input", "grad_input", "buffer", "optimizer_state"),
)
_WITHOUT = (Kind.RNG.value, Kind.OP_OUTPUT.value)  # operators have another table

UNKNOWN, EQUAL, DIFFERS, ONLY_A, ONLY_B = range(5)
"""How a record of a and its partner in b compare, by their checksums; unknown where one was not observed."""

Series = dict[str, tuple["int | float", ...]]
"""By statistic, for each run: the number of a row (int, -1 for none), or the value that never changes (float)."""


@dataclass(frozen=True, eq=False)
class Packed:
    """Series of many sites over common steps, within a budget of bytes.

    Attributes:
        sites: name of each site.
        about: module class, dtype, shape and numel of each site.
        series: of each site, rows of `values`.
        kept: int64 (P,), the steps that are kept.
        values: float32 (n, P), NaN where there is no value.
        states: uint8 (sites, P), how a and b compare; empty for a single run.
        total: sites there were.
        steps: steps there were.
    """

    sites: tuple[SiteName, ...]
    about: tuple[tuple[str, str, tuple[int, ...], int], ...]
    series: tuple[Series, ...]
    kept: NDArray[np.int64]
    values: NDArray[np.float32]
    states: NDArray[np.uint8]
    total: int
    steps: int


class _Window:
    """The steps that are kept, and where they lie in each run's table."""

    def __init__(self, tables: Sequence[Table], shifts: Sequence[int], steps: NDArray[np.int64]) -> None:
        """Find where the kept steps lie in each run's table.

        Args:
            tables: one rank of each run.
            shifts: what is added to the step numbers of each run.
            steps: int64 (P,), the steps that are kept.
        """
        self.steps = steps
        # Of sites that keep some steps, and of those that keep all: where the kept steps lie in both.
        self._places = []
        for table, shift in zip(tables, shifts, strict=True):
            both = (np.intersect1d(steps - shift, of.steps, return_indices=True)[1:] for of in (table.many, table.few))
            self._places.append((table, list(both)))

    def values_at(self, run: int, number: int, name: str) -> NDArray[Any]:
        """A site's statistic (checksums for any other `name`) at the kept steps of a run; NaN or 0 where absent."""
        table, common = self._places[run]
        column = table.column(number)
        values = _SERIES[name](column.floats) if name in _SERIES else column.checksum
        out = np.full(len(self.steps), np.nan if name in _SERIES else 0, values.dtype)
        there, rows = common[int(table.few.place[number] >= 0)]
        out[there] = values[rows]
        return out

    def series_of(self, runs: dict[int, int], kept: int) -> tuple[Series, list[NDArray[np.float32]]]:
        """What a page needs of one site: (its series by statistic, the new rows that they refer to).

        A series has an entry for each run: -1 for one without values, a float where the value never changes, else the
        number of a row. Runs with equal rows share one. A statistic without any values is left out.

        Args:
            runs: by run, the number of the site in its table; a run without the site is missing.
            kept: how many rows there are already, from which on new ones are numbered.
        """
        series: Series = {}
        rows: list[NDArray[np.float32]] = []
        for stat in _SERIES:
            entries: list[int | float] = []
            numbers: dict[bytes, int] = {}
            for run in range(len(self._places)):
                values = self.values_at(run, runs[run], stat) if run in runs else np.zeros(0, np.float32)
                if np.isnan(values).all():
                    entries.append(-1)
                elif (values == values[0]).all():
                    entries.append(float(f"{values[0]:.9g}"))
                else:
                    fresh = kept + len(rows)
                    entries.append(numbers.setdefault(values.tobytes(), fresh))
                    rows += [values] if entries[-1] == fresh else []
            if any(entry != -1 or isinstance(entry, float) for entry in entries):
                series[stat] = tuple(entries)
        return series, rows

    def states_of(self, runs: dict[int, int]) -> NDArray[np.uint8]:
        """uint8 (P,), how a and b compare at each kept step (`UNKNOWN` to `ONLY_B`); `runs` as in `series_of`."""
        none = np.zeros(len(self.steps), np.uint64)
        a, b = (self.values_at(run, runs[run], "checksum") if run in runs else none for run in (0, 1))
        cases = [(a != 0) & (a == b), (a != 0) & (b != 0), (a != 0) & (1 not in runs), (b != 0) & (0 not in runs)]
        return np.select(cases, [EQUAL, DIFFERS, ONLY_A, ONLY_B], UNKNOWN).astype(np.uint8)


def pack(tables: Sequence[Table], keep_step: int | None, shifts: Sequence[int], *, compared: bool) -> Packed:
    """Pack the histories of runs that are compared: the first is a, then b, then noise runs.

    Of hyper-parameters only learning rates are packed; random states and operators are not. Sites that find no room in
    `BUDGET` are left out, in the order of `_ORDER` the last; one site at least is packed.

    Args:
        tables: one rank of each run.
        keep_step: a step that must stay; None for none.
        shifts: what is added to the step numbers of each run; 0 where there are fewer.
        compared: whether the second run is b; False where there is no b.
    """
    shifts = [*shifts, *[0] * (len(tables) - len(shifts))]
    by_name: dict[SiteName, dict[int, int]] = {}
    for run, table in enumerate(tables):
        for name, number in table.numbers.items():
            if name[1] not in _WITHOUT and (name[1] != Kind.HYPERPARAMETER.value or name[4].endswith("['lr']")):
                by_name.setdefault(name, {})[run] = number
    names = sorted(by_name, key=lambda name: ([*_ORDER, name[1]].index(name[1]), name[3] > 0))
    every = np.unique(np.concatenate([of.many.steps + shift for of, shift in zip(tables, shifts, strict=True)]))
    room = BUDGET // (max(len(names), 1) * len(_SERIES) * len(tables) * _BYTES)
    window = _Window(tables, shifts, _thinned(every, min(max(room, LEAST_POINTS), MOST_POINTS), keep_step))
    rows: list[NDArray[np.float32]] = []
    packed: list[tuple[SiteName, tuple[str, str, tuple[int, ...], int], Series]] = []
    with np.errstate(all="ignore"):  # a store from a stranger may hold a negative variance
        for name in names:
            entry, more = window.series_of(by_name[name], len(rows))
            if packed and (len(rows) + len(more)) * len(window.steps) * _BYTES > BUDGET:
                break
            rows += more
            run, number = next(iter(by_name[name].items()))
            layout = tables[run].layout(number)
            shape = layout.shape if layout is not UNMEASURED else ()
            packed.append((name, (tables[run].sites.module_class[number], layout.dtype, shape, layout.numel), entry))
    states = [window.states_of(by_name[name]) for name, *_ in packed if compared]
    values = np.array(rows, np.float32).reshape(len(rows), len(window.steps))
    compares = np.array(states, np.uint8).reshape(len(states), len(window.steps))
    sites, about, series = zip(*packed, strict=True) if packed else ((), (), ())
    return Packed(sites, about, series, window.steps, values, compares, len(names), len(every))


def _thinned(every: NDArray[np.int64], points: int, keep: int | None) -> NDArray[np.int64]:
    """`points` of the steps, evenly chosen (all where there are no more), and the step `keep` if it is one."""
    places = np.unique(np.linspace(0, max(len(every) - 1, 0), min(points, len(every))).round().astype(np.int64))
    return np.union1d(every[places], every[every == keep])


# --- curves

_MOST = 4  # of a kind; a script with more losses than that has a history for each


@dataclass(frozen=True, eq=False)
class Curve:
    """One value per step.

    Attributes:
        name: for people.
        kind: `loss`, `gradients` or `learning rate`.
        steps: int64 (T,).
        values: float64 (T,); not finite where the run's value was not.
    """

    name: str
    kind: str
    steps: NDArray[np.int64]
    values: NDArray[np.float64]


def curves(table: Table, shift: int = 0) -> tuple[Curve, ...]:
    """Curves of a rank: losses, the gradient norm after the first loss, learning rates; of each kind the first `_MOST`.

    Curves without values are left out. `shift` is added to step numbers.
    """
    made = []
    for site in table.pick(Kind.LOSS)[:_MOST]:
        call = f" of backward {table.call[site]}" if table.call[site] else ""
        path = f" {table.path[site]}" if table.path[site] else ""
        made.append(_curve(table, site, "loss", f"loss{call}{path}"))
    made[1:1] = _gradient_norm(table)
    for site in table.rates()[:_MOST]:
        group = table.path[site].removesuffix("['lr']")
        made.append(_curve(table, site, "learning rate", f"learning rate of {table.fqn[site]} {group}".rstrip()))
    return tuple(replace(curve, steps=curve.steps + shift) for curve in made if len(curve.steps))


def _curve(table: Table, site: int, kind: str, name: str) -> Curve:
    """A site's mean, which is the value of a number, at the steps where it was recorded; NaN where it is not finite."""
    column = table.column(site)
    rows = np.flatnonzero((column.layout >= 0) | ~np.isnan(column.floats["mean"]))
    values = column.floats["mean"][rows].astype(np.float64)
    values[np.nan_to_num(column.floats["bad"][rows]) > 0] = np.nan
    return Curve(name, kind, column.steps[rows], values)


def _gradient_norm(table: Table) -> list[Curve]:
    """One curve: the L2 norm over all recorded gradients, at their last backward pass in each step; [] without any.

    NaN in a step with a value that is not finite; steps without gradients are left out.
    """
    sites = list({table.fqn[n]: n for n in sorted(table.pick(Kind.GRAD), key=lambda n: table.call[n])}.values())
    if not sites:
        return []
    with np.errstate(all="ignore"):
        norms, total = table.norms(sites), table.total_norm(sites)
    bad = np.stack([table.column(site).floats["bad"] > 0 for site in sites], axis=1).any(axis=1)
    total[bad] = np.nan
    seen = np.isfinite(norms).any(axis=1) | bad
    return [Curve("L2 norm of all recorded gradients", "gradients", table.many.steps[seen], total[seen])]


@dataclass(frozen=True)
class Depth:
    """Scale of values at each module of a model, over all steps.

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
    dtypes: tuple[str, ...]
    total: int


def depth(table: Table, kind: Kind, most: int = 300) -> Depth:
    """Scales of outputs (`Kind.OUTPUT`) or of the gradients at them (`Kind.GRAD_OUTPUT`), first call of each module.

    Of more than `most` modules every k-th is kept, with the smallest k that leaves no more. Modules without a finite
    value, of no elements or of another dtype than floating point are left out.
    """
    outputs = [site for site in table.pick(Kind.OUTPUT) if not table.call[site]]
    order = {(table.fqn[site], table.path[site]): place for place, site in enumerate(outputs)}
    sites = [site for site in table.pick(kind) if not table.call[site] and (table.fqn[site], table.path[site]) in order]
    sites.sort(key=lambda site: order[table.fqn[site], table.path[site]])
    rows = []
    for site in sites[:: max(1, -(-len(sites) // most))]:
        with np.errstate(all="ignore"):
            norm = table.norms([site])[:, 0]
        layout, finite = table.layout(site), norm[np.isfinite(norm)]
        if layout.numel and len(finite) and layout.dtype.startswith(FLOATS):
            scales = np.quantile(finite / layout.numel**0.5, [0.1, 0.5, 0.9]).tolist()
            rows.append((f"{table.fqn[site]}{table.path[site]}", *scales, layout.dtype))
    names, low, middle, high, dtypes = zip(*rows, strict=True) if rows else [()] * 5
    return Depth(names, low, middle, high, dtypes, len(sites))
