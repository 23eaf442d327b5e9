"""Moments that add up, and what is derived from them.

The problem: sums of x, x**2, x**3, x**4 merge easily and lose everything to cancellation once the mean is large
against the spread. The way: keep the mean and sums of powers of deviations from it, and merge two parts by the
pairwise formulas of Chan, Golub and LeVeque (1979) and their extension to third and fourth moments by Pebay
(Sandia report SAND2008-6212, 2008). All in float64.

What the columns mean, all over finite elements (complex numbers: over the absolute values):
`mean`; `amean` the mean of absolute values; `var` the biased variance, M2/n; `skew` (M3/n) / (M2/n)**1.5;
`kurt` Pearson's kurtosis (M4/n) / (M2/n)**2, 3 for a normal distribution. Where the variance is 0 there is no
skewness and no kurtosis; where there is no finite element there is nothing. Absent is NaN.
"""

from __future__ import annotations

from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from introspect_cli.tensors import rows as r

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


def finalise(rows: r.Rows) -> dict[str, npt.NDArray[np.float64]]:
    """The stored float statistics of rows, NaN where absent: a column of shape (n,) for each name."""
    floats = rows.view(np.float64)
    finite = rows[:, r.FINITE].astype(np.float64)
    some = finite > 0
    with np.errstate(all="ignore"):
        var = floats[:, r.M2] / finite
        spread = var > 0
        columns = {
            "min": floats[:, r.MIN],
            "max": floats[:, r.MAX],
            "absmin": floats[:, r.ABSMIN],
            "mean": floats[:, r.MEAN],
            "amean": floats[:, r.ABSSUM] / finite,
            "var": var,
            "skew": np.where(spread, floats[:, r.M3] / finite / (var * np.sqrt(var)), np.nan),
            "kurt": np.where(spread, floats[:, r.M4] / finite / (var * var), np.nan),
            "med": floats[:, r.MEDIAN],
            "mode": floats[:, r.MODE],
        }
        return {name: np.where(some & np.isfinite(column), column, np.nan) for name, column in columns.items()}


def counts(rows: r.Rows) -> dict[str, npt.NDArray[np.int64]]:
    """The stored counts of rows: a column of shape (n,) for each name."""
    ints = rows.view(np.int64)
    columns = {"nans": r.NANS, "posinfs": r.POSINFS, "neginfs": r.NEGINFS, "zeros": r.ZEROS}
    return {name: ints[:, column].copy() for name, column in columns.items()}
