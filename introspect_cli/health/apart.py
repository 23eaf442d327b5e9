"""What two ranks hold that ought to be equal and is not: where, since when, and how far apart."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from introspect_cli.store.batch import l2_norm

if TYPE_CHECKING:
    from collections.abc import Sequence

    from introspect_cli.store.batch import StepBatch
    from introspect_cli.store.whole import WholeReader

_MULTIPLE = 1e-5


@dataclass(frozen=True)
class Apart:
    """Copies that differ, or outputs of equal inputs.

    Attributes:
        step: the first step at which they do.
        site: their number.
        rank: the first rank that differs from the one that holds the lowest number.
        others: all ranks that do.
        base: the rank they are compared with.
        distance: L2 distance over the larger norm, from sketches; NaN where it is not known.
        scale: how many times the base's the rank's is, where it is a multiple; NaN otherwise.
        lone: whether it is one element, of which no multiple tells anything.
    """

    step: int
    site: int
    rank: int
    others: tuple[int, ...]
    base: int
    distance: float
    scale: float
    lone: bool = False


def distance_of(
    whole: WholeReader, batches: Sequence[StepBatch], one: tuple[int, int], two: tuple[int, int]
) -> tuple[float, float]:
    """How far apart two records are, and by which factor; see `Apart`.

    Args:
        whole: knows their layouts.
        batches: of each rank.
        one: a rank's position, and its row.
        two: another's.
    """
    sketches = [batches[at].sketch for at, _ in (one, two)]
    if sketches[0] is None or sketches[1] is None or "mean" not in batches[one[0]].floats:
        return np.nan, np.nan
    x, y = sketches[0][one[1]].astype(np.float64), sketches[1][two[1]].astype(np.float64)
    sizes = []
    for at, row in (one, two):
        numel = float(whole.readers[at].layouts[int(batches[at].layout[row])].numel)
        floats = batches[at].floats
        sizes.append(float(l2_norm(floats["mean"][row], floats["var"][row], np.float64(numel))))
    larger = max(sizes)
    scale = float(x @ y) / float(x @ x) if x @ x else np.nan
    several = whole.readers[one[0]].layouts[int(batches[one[0]].layout[one[1]])].numel > 1  # one is always a multiple
    multiple = several and abs(scale) > 0 and np.linalg.norm(y - scale * x) < _MULTIPLE * np.linalg.norm(y)
    return float(np.linalg.norm(x - y) / larger) if larger else np.nan, scale if multiple else np.nan
