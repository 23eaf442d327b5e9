"""What follows from what is stored of a tensor: further statistics, and how its sketch is related to another."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from introspect_cli.statistics import DERIVED_STATS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from numpy.typing import NDArray

    Array = NDArray[Any]

ROUNDING = {"float64": 2.0**-53, "float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
"""Unit roundoff by dtype: half the distance from 1 to the next number; Higham, Accuracy and Stability, 2.1."""


def _infs(c: Mapping[str, Array]) -> Array:
    return np.where(c["posinfs"] >= 0, c["posinfs"] + c["neginfs"], np.nan)


def l2_norm(mean: Array, var: Array, finite: Array) -> Array:
    """The L2 norm from mean, variance and the number of finite elements; non-finite elements are ignored."""
    return np.asarray(np.sqrt((var + mean * mean) * np.maximum(finite, 0)))


FORMULAS: dict[str, Callable[[Mapping[str, Array]], Array]] = {
    "infs": _infs,
    "absmax": lambda c: np.maximum(np.abs(c["min"]), np.abs(c["max"])),
    "absmean": lambda c: np.abs(c["mean"]),
    "uvar": lambda c: np.where(c["n"] > 1, c["var"] * c["n"] / np.maximum(c["n"] - 1, 1), np.nan),
    "std": lambda c: np.sqrt(c["var"]),
    "l2": lambda c: l2_norm(c["mean"], c["var"], c["n"]),
}
"""How each of `DERIVED_STATS` follows from stored columns and `n`, the number of finite elements (moments are stored
without the others); `uvar` by Bessel's correction."""


def derived_stats(counts: Mapping[str, Array], floats: Mapping[str, Array], numel: Array) -> dict[str, Array]:
    """Derived statistics of n records, float64 (n,) by name, NaN where absent or infinite; {} without counts.

    Args:
        counts: int64 (n,) by name, -1 where absent.
        floats: float (n,) by name, NaN where absent.
        numel: int64 (n,), elements of each record's tensor.
    """
    if not counts:
        return {}
    left_out = sum(np.maximum(counts[name], 0) for name in ("nans", "posinfs", "neginfs"))
    columns = {**counts, **floats, "n": (numel - left_out).astype(np.float64)}
    with np.errstate(all="ignore"):
        derived = {name: FORMULAS[name](columns) for name in DERIVED_STATS}
        return {name: np.where(np.isfinite(column), column, np.nan) for name, column in derived.items()}


def scale_between(a: NDArray[Any], b: NDArray[Any]) -> tuple[float, float]:
    """The least-squares factor c of c * a to b, and |b - c a| / |b|; both NaN where one is zero or not finite.

    Sketches are linear: a residual near 0 means that one tensor is c times the other.
    """
    a, b = a.astype(np.float64), b.astype(np.float64)
    size_a, size_b = float(a @ a), float(b @ b)
    if not (np.isfinite(size_a) and np.isfinite(size_b)) or size_a == 0 or size_b == 0:
        return np.nan, np.nan
    factor = float(a @ b) / size_a
    return factor, float(np.linalg.norm(b - factor * a)) / size_b**0.5
