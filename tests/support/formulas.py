"""Moments that add up, and what is derived from them.

Sums of x, x**2, x**3, x**4 merge easily and lose everything to cancellation once the mean is large against the
spread. So rows keep the mean and sums of powers of deviations from it, and merge two parts by the
pairwise formulas of Chan, Golub and LeVeque (1979) and their extension to third and fourth moments by Pebay
(Sandia report SAND2008-6212, 2008). All in float64.

What the columns mean, all over finite elements (complex numbers: over the absolute values):
`mean`; `amean` the mean of absolute values; `var` the biased variance, M2/n; `skew` (M3/n) / (M2/n)**1.5;
`kurt` Pearson's kurtosis (M4/n) / (M2/n)**2, 3 for a normal distribution. Where the variance is 0 there is no
skewness and no kurtosis; where there is no finite element there is nothing. Absent is NaN.

It is the oracle of what the compiled kernels merge and derive.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import numpy.typing as npt

from introspect_cli.statistics import STATISTICS
from introspect_cli.tensors import checksum
from introspect_cli.tensors import rows as r
from introspect_cli.tensors.row_notes import NOTHING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

Floats = npt.NDArray[np.float64]

Number = TypeVar("Number", bound=Any)
Moments = tuple[Number, Number, Number, Number, Number]
"""n, mean, M2, M3, M4: floats, numpy arrays or torch tensors alike."""


def merge_moments(a: Moments[Number], b: Moments[Number]) -> Moments[Number]:
    """Moments of two disjoint parts taken together; either may be empty (n = 0, all zero).

    Works elementwise on arrays and on tensors, without branching on values.
    """
    n_a, mean_a, m2_a, m3_a, m4_a = a
    n_b, mean_b, m2_b, m3_b, m4_b = b
    n = n_a + n_b
    safe = n + (n == 0)
    delta = mean_b - mean_a
    step = delta / safe
    cross = delta * step * n_a * n_b
    mean = mean_a + step * n_b
    m2 = m2_a + m2_b + cross
    m3 = m3_a + m3_b + cross * step * (n_a - n_b) + 3.0 * step * (n_a * m2_b - n_b * m2_a)
    m4 = (
        m4_a
        + m4_b
        + cross * step * step * (n_a * n_a - n_a * n_b + n_b * n_b)
        + 6.0 * step * step * (n_a * n_a * m2_b + n_b * n_b * m2_a)
        + 4.0 * step * (n_a * m3_b - n_b * m3_a)
    )
    return n, mean, m2, m3, m4


def merge(a: r.Rows, b: r.Rows) -> r.Rows:
    """Rows of two disjoint parts, added up; shape (n, 32) each. Medians and modes do not merge and go absent."""
    out = r.empty(len(a))
    a_float, b_float, out_float = a.view(np.float64), b.view(np.float64), out.view(np.float64)
    out[:, : r.ZEROS + 1] = a[:, : r.ZEROS + 1] + b[:, : r.ZEROS + 1]
    for column, pick in ((r.MIN, np.minimum), (r.MAX, np.maximum), (r.ABSMIN, np.minimum)):
        out_float[:, column] = pick(a_float[:, column], b_float[:, column])
    for column in (r.ABSSUM, *range(r.SKETCH, r.WORDS)):
        out_float[:, column] = a_float[:, column] + b_float[:, column]
    with np.errstate(all="ignore"):
        merged: Moments[npt.NDArray[np.float64]] = merge_moments(_moments(a), _moments(b))
    for column, values in zip((r.MEAN, r.M2, r.M3, r.M4), merged[1:], strict=True):
        out_float[:, column] = values
    return out


def _moments(rows: r.Rows) -> Moments[npt.NDArray[np.float64]]:
    floats = rows.view(np.float64)
    count = rows[:, r.FINITE].astype(np.float64)
    return count, floats[:, r.MEAN], floats[:, r.M2], floats[:, r.M3], floats[:, r.M4]


class Columns:
    """Raw results of n tensors as columns: what formulas are made of."""

    def __init__(self, rows: r.Rows) -> None:
        self.ints = rows.view(np.int64)
        self.floats = rows.view(np.float64)
        self.n = rows[:, r.FINITE].astype(np.float64)
        """Finite elements, float64 (n,)."""
        self.var = self.floats[:, r.M2] / self.n
        """Biased variance over them."""


def _spread(c: Columns, values: Floats) -> Floats:
    """The values where the variance is not 0; NaN elsewhere."""
    return np.where(c.var > 0, values, np.nan)


FORMULAS: dict[str, Callable[[Columns], npt.NDArray[Any]]] = {
    "nans": lambda c: c.ints[:, r.NANS],
    "posinfs": lambda c: c.ints[:, r.POSINFS],
    "neginfs": lambda c: c.ints[:, r.NEGINFS],
    "zeros": lambda c: c.ints[:, r.ZEROS],
    "min": lambda c: c.floats[:, r.MIN],
    "max": lambda c: c.floats[:, r.MAX],
    "absmin": lambda c: c.floats[:, r.ABSMIN],
    "mean": lambda c: c.floats[:, r.MEAN],
    "amean": lambda c: c.floats[:, r.ABSSUM] / c.n,
    "var": lambda c: c.var,
    "skew": lambda c: _spread(c, c.floats[:, r.M3] / c.n / (c.var * np.sqrt(c.var))),
    "kurt": lambda c: _spread(c, c.floats[:, r.M4] / c.n / (c.var * c.var)),
    "med": lambda c: c.floats[:, r.MEDIAN],
    "mode": lambda c: c.floats[:, r.MODE],
}
"""How each of `statistics.STATISTICS` is computed from rows: whole columns, of the type named there, shape (n,)."""


def finalise(rows: r.Rows, names: Iterable[str]) -> dict[str, npt.NDArray[Any]]:
    """The statistics `names` of rows, by name: columns of shape (n,); NaN where a number is absent."""
    out = {}
    with np.errstate(all="ignore"):
        columns = Columns(rows)
        some = columns.n > 0
        for name in names:
            kind = STATISTICS[name].type
            column = FORMULAS[name](columns)
            if np.dtype(kind).kind == "f":
                column = np.where(some & np.isfinite(column), column, np.nan)
            out[name] = column.astype(kind)
    return out


def checksums(raw: npt.NDArray[np.uint64], headers: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """`mix(raw + header)` over arrays of any one shape."""
    return checksum.mix(raw + headers)


def fill(
    arrays: dict[str, npt.NDArray[Any]], rows: r.Rows, facts: Any, slots: list[int], fixed: dict[int, int]
) -> None:
    """What the kernels put into arrays of a step's records, by numpy."""
    pick = np.array(slots, np.uint32)
    seen, rows = facts.seen[pick], rows[pick]
    made: dict[str, npt.NDArray[Any]] = finalise(rows, [name for name in STATISTICS if name in arrays])
    if "sketch" in arrays:
        with np.errstate(all="ignore"):
            made["sketch"] = rows.view(np.float64)[:, r.SKETCH :].astype(np.float32)
    absent = np.flatnonzero(seen)
    for name, column in made.items():
        column[absent] = -1 if column.dtype.kind == "i" else np.nan
        arrays[name][:] = column
    sums = checksums(rows[:, r.RAW], facts.headers[pick])
    sums[seen == NOTHING] = 0
    for record, slot in enumerate(slots):
        if slot in facts.kinds and slot in fixed:
            sums[record] = fixed[slot]
    arrays["checksum"][:] = sums
    if "status" in arrays:
        arrays["status"][:] = facts.status[pick]
