"""The statistics that follow from others: they need no bytes of their own."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from introspect_cli.statistics import DERIVED_STATS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from introspect_cli.store.batch import Array, StepBatch


def _infs(c: Mapping[str, Array]) -> Array:
    return np.where(c["posinfs"] >= 0, c["posinfs"] + c["neginfs"], np.nan)


def l2_norm(mean: Array, var: Array, finite: Array) -> Array:
    """L2 norm from the moments and the number of finite elements: the others are in no moment."""
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
    """Derived statistics of n records, float64 (n,) by name, NaN where absent.

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


_TOGETHER = 256


def record_stats(batch: StepBatch, row: int, numels: Callable[[Array], list[int]]) -> dict[str, float]:
    """All statistics of one row, stored and derived; counts are ints, absent ones are left out.

    numpy takes as long for one row as for some hundred, so what is derived is derived for its neighbours, too.

    Args:
        batch: the step's.
        row: which.
        numels: gives how many elements tensors of some layouts have.
    """
    block, place = divmod(row, _TOGETHER)
    derived = batch.derived.get(block)
    if derived is None:
        rows = slice(block * _TOGETHER, (block + 1) * _TOGETHER)
        counts: dict[str, Array] = {name: column[rows] for name, column in batch.counts.items()}
        floats = {name: column[rows] for name, column in batch.floats.items()}
        numel = np.array(numels(batch.layout[rows]), np.int64)
        derived = batch.derived[block] = derived_stats(counts, floats, numel)
    out: dict[str, float] = {name: int(column[row]) for name, column in batch.counts.items() if column[row] >= 0}
    numbers = {name: float(column[row]) for name, column in batch.floats.items()}
    numbers |= {name: float(column[place]) for name, column in derived.items()}
    for name, value in numbers.items():
        if not math.isnan(value):
            out[name] = int(value) if name == "infs" else value
    return out
