"""Which samples of a batch differ, of runs that were captured with `--per-sample`.

Such a run keeps a checksum and a sketch for each index of a tensor's first dimension, so that no second run is needed
to know whether one sample is wrong or all of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from introspect_cli.compare.closeup import batch_size
from introspect_cli.compare.join.distance import relative, sketch_norms
from introspect_cli.records import count
from introspect_cli.sums import samples_key

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from introspect_cli.compare.result import Divergence
    from introspect_cli.store.reader import Run

_LISTED = 6


def samples_told(a: Run, b: Run, first: Divergence) -> str:
    """Which samples differ and by how much, as a sentence; "" where that was not recorded.

    Raises:
        StoreError: what was stored of them is damaged.
    """
    if first.a is None or first.b is None or not first.a.layout.shape or first.a.layout.shape != first.b.layout.shape:
        return ""
    sides = [_samples(run, own.checksum, own.layout.shape[0]) for run, own in ((a, first.a), (b, first.b))]
    if sides[0] is None or sides[1] is None:
        return ""
    (sums_a, sketch_a), (sums_b, sketch_b) = sides[0], sides[1]
    total, apart = len(sums_a), np.flatnonzero(sums_a != sums_b)
    rel = _distances(sketch_a, sketch_b)
    is_batch = total == batch_size(a.rank(first.rank).records(first.step))
    word, plural = ("sample", "samples") if is_batch else ("index of dimension 0", "indices of dimension 0")
    if len(apart) == total:
        return f"All {total} {plural} differ{_range(rel, apart)}."
    order = sorted(apart.tolist(), key=lambda at: -(rel[at] if rel is not None else 0.0))
    shown = ", ".join(f"{at}{_far(rel, at)}" for at in order[:_LISTED])
    more = f" and {len(order) - _LISTED} more" if len(order) > _LISTED else ""
    rest = f"the other {total - len(apart)} are equal" if total - len(apart) > 1 else "the other one is equal"
    verb = "differs" if len(apart) == 1 else "differ"
    return f"Of {total} {plural}, {count(len(apart), word, plural)} {verb}: {shown}{more}; {rest}."


def _samples(run: Run, checksum: int, number: int) -> tuple[NDArray[np.uint64], NDArray[np.float32] | None] | None:
    """Checksum and sketch of each sample of a tensor; None where they were not kept."""
    stored = run.tensor(samples_key(checksum)) if checksum else None
    if (
        stored is None
        or stored.dtype != np.uint8
        or stored.ndim != 2
        or stored.shape not in ((number, 8), (number, 72))
    ):
        return None
    rows = np.ascontiguousarray(stored)
    sketch = np.ascontiguousarray(rows[:, 8:]).view("<f4") if rows.shape[1] > 8 else None
    return np.ascontiguousarray(rows[:, :8]).view("<u8").reshape(-1), sketch


def sample_sums(run: Run, checksum: int, number: int) -> NDArray[np.uint64] | None:
    """The checksum of each sample of a tensor; None where they were not kept.

    Args:
        run: that recorded it.
        checksum: the tensor's.
        number: how many samples it has.

    Raises:
        StoreError: what was stored of them is damaged.
    """
    found = _samples(run, checksum, number)
    return None if found is None else found[0]


def _distances(one: NDArray[np.float32] | None, two: NDArray[np.float32] | None) -> NDArray[np.float64] | None:
    """Estimated relative L2 distance of each sample; None where there are no sketches."""
    if one is None or two is None:
        return None
    apart = sketch_norms(one.astype(np.float64) - two.astype(np.float64))
    return np.nan_to_num(relative(apart, np.maximum(sketch_norms(one), sketch_norms(two))), posinf=0.0)


def _far(rel: NDArray[np.float64] | None, at: int) -> str:
    return f" (relative L2 {rel[at]:.2g})" if rel is not None and rel[at] else ""


def _range(rel: NDArray[np.float64] | None, apart: NDArray[np.int64]) -> str:
    if rel is None or not rel[apart].any():
        return ""
    most = int(apart[np.argmax(rel[apart])])
    return f" (relative L2 {rel[apart].min():.2g} to {rel[apart].max():.2g}, most at {most})"
