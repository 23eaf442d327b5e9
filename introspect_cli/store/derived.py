"""Statistics that follow from the stored ones, so that they need no bytes of their own.

Formulas, over the n = numel - nans - infs finite elements (moments are stored without the others):
infs = posinfs + neginfs; std = sqrt(var); uvar = var * n / (n - 1) (Bessel); l2 = sqrt((var + mean**2) * n);
absmax = max(|min|, |max|); absmean = |mean|.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from collections.abc import Mapping

DERIVED_STATS = ("infs", "absmax", "absmean", "uvar", "std", "l2")
"""Derived statistics, in the order they are shown."""

Array = NDArray[Any]


def derived_stats(counts: Mapping[str, Array], floats: Mapping[str, Array], numel: Array) -> dict[str, Array]:
    """Derived statistics of n records, float64 (n,) by name, NaN where absent.

    Args:
        counts: int64 (n,) by name, -1 where absent.
        floats: float (n,) by name, NaN where absent.
        numel: int64 (n,), elements of each record's tensor.
    """
    if not counts:
        return {}
    known = counts["posinfs"] >= 0
    infs = np.where(known, counts["posinfs"] + counts["neginfs"], 0)
    finite = (numel - infs - np.where(known, counts["nans"], 0)).astype(np.float64)
    mean, var = floats["mean"], floats["var"]
    with np.errstate(all="ignore"):
        return {
            "infs": np.where(known, infs, np.nan),
            "absmax": np.maximum(np.abs(floats["min"]), np.abs(floats["max"])),
            "absmean": np.abs(mean),
            "uvar": np.where(finite > 1, var * finite / np.maximum(finite - 1, 1), np.nan),
            "std": np.sqrt(var),
            "l2": np.sqrt((var + mean * mean) * finite),
        }


def record_stats(counts: Mapping[str, Array], floats: Mapping[str, Array], numel: int, row: int) -> dict[str, float]:
    """All statistics of one row, stored and derived; counts are ints, absent ones are left out."""
    own_counts = {name: column[row : row + 1] for name, column in counts.items()}
    own_floats = {name: column[row : row + 1] for name, column in floats.items()}
    out: dict[str, float] = {name: int(value[0]) for name, value in own_counts.items() if value[0] >= 0}
    derived = derived_stats(own_counts, own_floats, np.array([numel]))
    for name, value in (*own_floats.items(), *derived.items()):
        if not np.isnan(value[0]):
            out[name] = int(value[0]) if name == "infs" else float(value[0])
    return out
