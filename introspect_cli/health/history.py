"""Statistics of sites over time, packed small enough to be mailed.

The problem: a page that shows any statistic of any site of two runs cannot hold a thousand steps of ten thousand sites.
The way: steps are thinned (extremes keep their windows' extremes, and the step that matters is always kept), values are
16-bit numbers between the least and the largest of each series, on a logarithmic scale where they span decades; what is
constant takes no room, and neither does the second run where it equals the first. Where there are still too many sites,
those that say least are left out, and the page says how many.

Such series are for drawing. Whether two records are equal is told by their checksums, step by step, and numbers are
shown as they were recorded: for the step that matters first, and for as many others as there is room.
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

STATS = ("mean", "std", "amean", "min", "max", "zeros", "bad")
"""Statistics that are packed; l2 and absmax follow from them."""

BUDGET = 2_600_000
"""Bytes of all series before they are compressed."""

EXACT_BUDGET = 700_000
"""Bytes of the values as they were recorded."""

MOST_POINTS = 2000
LEAST_POINTS = 64
ABSENT = 65535
_LEVELS = 65534
_DECADES = 100.0
_SERIES_A_SITE = 5.5  # of the seven; the others are constant or absent nearly always

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

EXACT = ("mean", "std", "absmax")
"""Statistics that are kept as they were recorded."""

UNKNOWN, EQUAL, DIFFERS, ONLY_A, ONLY_B = range(5)
"""How a record of a and its partner in b compare, by their checksums; unknown where one was not observed."""

_RANK = {kind.value: place for place, kind in enumerate(_ORDER)}

SiteName = tuple[str, str, str, int, str]
"""Phase, kind, FQN, call, path."""


@dataclass(frozen=True, eq=False)
class Packed:
    """Series of many sites over the same steps.

    Attributes:
        steps: int64 (P,), steps that are kept.
        sites: name of each site.
        about: module class, dtype, shape and numel of each site.
        series: of each site, by statistic: whether the scale is logarithmic, its ends, and for each run the number of
            the row in `values`; -1 where the run has no such series. A constant series has equal ends and row 0.
        values: uint16 (n, P), `ABSENT` where there is no value.
        total: sites there were.
        states: uint8 (sites, P), how a and b compare; empty for a single run.
        exact_steps: places among `steps` of those whose recorded values are kept, the step that matters among them.
        exact: float32 (exact steps, sites, `EXACT`, runs a and b), NaN where there is no value.
    """

    steps: NDArray[np.int64]
    sites: tuple[SiteName, ...]
    about: tuple[tuple[str, str, tuple[int, ...], int], ...]
    series: tuple[dict[str, tuple[bool, float, float, tuple[int, ...]]], ...]
    values: NDArray[np.uint16]
    total: int
    states: NDArray[np.uint8]
    exact_steps: tuple[int, ...]
    exact: NDArray[np.float32]


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
    a_site = 2 * _SERIES_A_SITE * len(tables)
    points = int(max(LEAST_POINTS, min(MOST_POINTS, len(every), budget / (a_site * max(len(names), 1)))))
    kept = names[: max(int(budget / (a_site * min(points, max(len(every), 1)))), 16)]
    steps = _thinned(every, points, keep_step)
    windows = [_Windows(table, steps - shift) for table, shift in zip(tables, shifts, strict=True)]
    rows: list[NDArray[np.uint16]] = [np.zeros(len(steps), np.uint16)]
    with np.errstate(all="ignore"):  # a store from a stranger may hold a negative variance
        series = [_site(found[name], windows, rows) for name in kept]
    own = [next(iter(found[name].items())) for name in kept]
    about = []
    for run, number in own:
        layout = tables[run].layout(number)
        described = (layout.dtype, layout.shape, layout.numel) if layout else ("", (), 0)
        about.append((tables[run].module_class[number], *described))
    sides = windows[: 1 + compared]
    chosen = _exact_steps(steps, keep_step, EXACT_BUDGET // max(len(kept) * len(EXACT) * len(sides) * 4, 1))
    exact = np.full((len(chosen), len(kept), len(EXACT), len(sides)), np.nan, np.float32)
    states = np.zeros((len(kept) if compared else 0, len(steps)), np.uint8)
    for place, name in enumerate(kept):
        for run, window in enumerate(sides):
            if run in found[name]:
                exact[:, place, :, run] = window.recorded(found[name][run], chosen)
        if compared:
            bits = [
                window.checksums(found[name][run]) if run in found[name] else None for run, window in enumerate(sides)
            ]
            states[place] = _states(bits[0], bits[1], len(steps))
    return Packed(
        steps, tuple(kept), tuple(about), tuple(series), np.stack(rows), len(names), states, tuple(chosen), exact
    )


def _exact_steps(steps: NDArray[np.int64], keep: int | None, most: int) -> list[int]:
    """Places of the steps whose recorded values are kept: the one that matters, else the first, and others evenly."""
    if not len(steps):
        return []
    first = int(np.searchsorted(steps, keep)) if keep is not None and keep in steps else 0
    spread = np.linspace(0, len(steps) - 1, min(max(most - 1, 0), len(steps))).round().astype(np.int64)
    return sorted({first, *spread.tolist()})


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


class _Windows:
    """Where the kept steps lie in a table, and how far each of them reaches."""

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

    def get(self, number: int, stat: str) -> NDArray[np.float64]:
        """A statistic at the kept steps, NaN where absent."""
        columns, place = self.table.columns(number)
        there, rows = self._of[id(columns)]
        out = np.full(self.length, np.nan)
        if not len(rows):
            return out
        if stat == "std":
            out[there] = np.sqrt(columns.floats["var"][rows, place].astype(np.float64))
        elif stat in ("min", "max", "bad"):
            whole = (columns.bad if stat == "bad" else columns.floats[stat])[:, place].astype(np.float64)
            out[there] = (np.fmin if stat == "min" else np.fmax).reduceat(whole, rows)
        else:
            out[there] = (columns.zeros if stat == "zeros" else columns.floats[stat])[rows, place]
        return out

    def recorded(self, number: int, places: Sequence[int]) -> NDArray[np.float64]:
        """The statistics of `EXACT` at some of the kept steps as they were recorded, (places, statistics)."""
        columns, place = self.table.columns(number)
        there, rows = self._of[id(columns)]
        own = {name: column[rows, place].astype(np.float64) for name, column in columns.floats.items()}
        with np.errstate(all="ignore"):
            found = (own["mean"], np.sqrt(own["var"]), np.maximum(np.abs(own["min"]), np.abs(own["max"])))
        out = np.full((self.length, len(EXACT)), np.nan)
        out[there] = np.stack(found, axis=1)
        picked: NDArray[np.float64] = out[list(places)]
        return picked

    def checksums(self, number: int) -> NDArray[np.uint64]:
        """A site's checksums at the kept steps, 0 where it was not observed."""
        columns, place = self.table.columns(number)
        there, rows = self._of[id(columns)]
        out = np.zeros(self.length, np.uint64)
        out[there] = columns.checksum[rows, place]
        return out


def _site(
    runs: dict[int, int], windows: Sequence[_Windows], rows: list[NDArray[np.uint16]]
) -> dict[str, tuple[bool, float, float, tuple[int, ...]]]:
    found = {}
    for stat in STATS:
        values = [
            window.get(runs[run], stat) if run in runs else np.full(window.length, np.nan)
            for run, window in enumerate(windows)
        ]
        together = np.concatenate(values)
        finite = together[np.isfinite(together)]
        if not len(finite):
            continue
        low, high = float(finite.min()), float(finite.max())
        if low == high and all(np.isnan(own).all() or np.isfinite(own).all() for own in values):
            found[stat] = (False, low, high, tuple(-1 if np.isnan(own).all() else 0 for own in values))
            continue
        log = low > 0 and high > low * _DECADES
        numbers: list[int] = []
        seen: dict[bytes, int] = {}
        for own in values:
            if np.isnan(own).all():
                numbers.append(-1)
                continue
            row = quantised(own, low, high, log=log)
            number = seen.setdefault(row.tobytes(), len(rows))
            if number == len(rows):
                rows.append(row)
            numbers.append(number)
        found[stat] = (log, low, high, tuple(numbers))
    return found


def quantised(values: NDArray[np.float64], low: float, high: float, *, log: bool) -> NDArray[np.uint16]:
    """Values between `low` and `high` as 16-bit numbers; `ABSENT` where not finite."""
    with np.errstate(all="ignore"):
        if high == low:
            share = np.zeros(len(values))
        elif log:
            share = np.log(values / low) / np.log(high / low)
        else:
            share = (values - low) / (high - low)
        level = np.clip(np.round(share * _LEVELS), 0, _LEVELS)
        return np.where(np.isfinite(values), level, ABSENT).astype(np.uint16)


@dataclass(frozen=True)
class Depth:
    """How large values are along the depth of a model, over all steps.

    Attributes:
        names: modules in execution order.
        low: 10th percentile over the steps of the root mean square of each.
        middle: median.
        high: 90th percentile.
    """

    names: tuple[str, ...]
    low: tuple[float, ...]
    middle: tuple[float, ...]
    high: tuple[float, ...]


def depth(table: Table, kind: Kind, most: int = 2000) -> Depth:
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
            rows.append((f"{table.fqn[site]}{table.path[site]}", float(low), float(middle), float(high)))
    names, lows, middles, highs = zip(*rows, strict=True) if rows else ((), (), (), ())
    return Depth(names, lows, middles, highs)
