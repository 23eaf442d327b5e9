"""Distance of two records.

Exact where both runs stored the whole tensors. Otherwise estimated from sketches, a linear map to 16 numbers: the norm
of the difference of two sketches is 0.76 to 1.32 of the tensors' L2 distance (5th and 95th percentile). Relative to the
larger of the two exact L2 norms: symmetric, defined when either is zero, and at most 2.

Values of different shapes have no distance. Values gathered from ranks without a known place have no shape, and equal
values on all ranks may be copies or equal parts: only their sizes can differ.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from introspect_cli.records import Joined, Layout, Status, Summary
from introspect_cli.store.read.step_reader import l2_norm

if TYPE_CHECKING:
    from collections.abc import Sequence

    from introspect_cli.compare.terms.sites import Ids, Mask
    from introspect_cli.store.format.batch import StepBatch
    from introspect_cli.store.read.run import Run

Floats = npt.NDArray[np.float64]

ROUNDING = {"float64": 2.0**-53, "float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
"""Unit roundoff by dtype: half the distance from 1 to the next number; Higham, Accuracy and Stability, 2.1."""

_NOT_FINITE = ("nans", "posinfs", "neginfs")
_EXACT = 1e-5
"""How far statistics are to be trusted, relative to the norm."""

WHOLE = ("float", "bfloat", "complex")
"""How dtypes begin of which sums are rounded."""


class Layouts:
    """Properties of one rank's layouts as arrays indexed by layout number; those of no layouts have one element.

    Attributes:
        numel: float64, number of elements.
        floating: bool, whether sums of the dtype are rounded (`WHOLE`).
        unit: float64, unit roundoff of the coarsest dtype; 0 for dtypes without rounding.
        dtype: int64, a number per dtype, the same in all `Layouts` of the process.
        stored: bool, whether the tensor is sparse, jagged or nested.
        scalar: bool, whether it has no dimensions.
        coarse: whether any layout is of bfloat16; not an array.
        shape: int64, a number per shape, the same in all `Layouts` of the process.
    """

    def __init__(self, layouts: Sequence[Layout]) -> None:
        """Compute all arrays now.

        New shapes and dtypes get numbers in `_SHAPES` and `_DTYPES`, which all instances share.
        """
        self.numel = np.array([max(layout.numel, 0) for layout in layouts] or [0], dtype=np.float64)
        self.floating = np.array([layout.dtype.startswith(WHOLE) for layout in layouts] or [False], dtype=np.bool_)
        # ranks that compute in several dtypes have them all in one layout: `float32 and bfloat16`
        units = [max(ROUNDING.get(dtype, 0.0) for dtype in layout.dtype.split(" and ")) for layout in layouts]
        self.unit = np.array(units or [0.0])
        dtypes: dict[str, int] = _DTYPES
        self.dtype = np.array([dtypes.setdefault(layout.dtype, len(dtypes)) for layout in layouts] or [0], np.int64)
        # of sparse and nested ones, statistics and sketch have the values, and not where they stand
        stored = [layout.strides.startswith(("sparse", "jagged", "nested")) for layout in layouts]
        self.stored = np.array(stored or [False])
        self.scalar = np.array([not layout.shape for layout in layouts] or [False], dtype=np.bool_)
        self.coarse = any(layout.dtype == "bfloat16" for layout in layouts)
        names: dict[tuple[Any, ...], int] = _SHAPES
        self.shape = np.array(
            [names.setdefault(tuple(layout.shape), len(names)) for layout in layouts] or [0], dtype=np.int64
        )


_SHAPES: dict[tuple[Any, ...], int] = {}  # shape to number, so that two runs' layouts compare as integers
_DTYPES: dict[str, int] = {}


def norms(batch: StepBatch, rows: Ids, layouts: Layouts) -> Floats:
    """L2 norm of the finite elements of each row's tensor, float64 (rows,), from mean and variance.

    NaN for sparse, jagged and nested tensors.
    """
    mean = np.asarray(batch.floats["mean"], dtype=np.float64)[rows]
    var = np.asarray(batch.floats["var"], dtype=np.float64)[rows]
    numel = np.where(layouts.stored[batch.layout[rows]], np.nan, layouts.numel[batch.layout[rows]])
    for name in _NOT_FINITE:
        numel = numel - np.asarray(batch.counts[name])[rows]
    with np.errstate(invalid="ignore", over="ignore"):
        return l2_norm(mean, var, numel)


def sketch_norms(sketch: npt.NDArray[np.float32] | Floats) -> Floats:
    """L2 norm of each sketch: float64 (n,) of an array (n, 16)."""
    wide = sketch.astype(np.float64)
    return np.asarray(np.sqrt(np.einsum("ij,ij->i", wide, wide)))


def has_norms(batch: StepBatch) -> bool:
    """Whether the batch has means, variances and counts of NaNs, which give L2 norms."""
    return "mean" in batch.floats and "var" in batch.floats and "nans" in batch.counts


def nan_throughout(batch: StepBatch, layouts: Layouts) -> Mask:
    """Mask over all rows of the batch, true where every element is NaN; all False if NaNs were not counted.

    False for tensors without elements.
    """
    if "nans" not in batch.counts:
        return np.zeros(len(batch), np.bool_)
    sizes = layouts.numel[batch.layout]
    return np.asarray((np.asarray(batch.counts["nans"]) == sizes) & (sizes > 0))


def distances(
    a: StepBatch, b: StepBatch, rows_a: Ids, rows_b: Ids, layouts_a: Layouts, layouts_b: Layouts
) -> tuple[Floats, Floats]:
    """(estimated L2 distance, larger of the two L2 norms) of each pair of rows, both float64 (n,).

    Norms are from statistics, else from sketches; both are NaN without sketches. The distance is also NaN where it is
    unknown: another shape, unequal counts of NaNs or infinities, sparse tensors with other places, or equal finite
    elements beside some that are not finite. A bound from the statistics stands in for the sketches' estimate where it
    is more than twice that.

    Args:
        a: records of run a.
        b: records of run b.
        rows_a: rows of `a`.
        rows_b: rows of `b`, one for each of `rows_a`.
        layouts_a: of run a.
        layouts_b: of run b.
    """
    count = len(rows_a)
    unknown = np.full(count, np.nan)
    if not count or a.sketch is None or b.sketch is None:
        return unknown, unknown.copy()
    sketch_a, sketch_b = a.sketch[rows_a], b.sketch[rows_b]
    distance = sketch_norms(sketch_a.astype(np.float64) - sketch_b.astype(np.float64))
    size_a = norms(a, rows_a, layouts_a) if has_norms(a) else unknown
    size_b = norms(b, rows_b, layouts_b) if has_norms(b) else unknown
    scale = np.fmax(size_a, size_b)
    unsized = np.flatnonzero(~np.isfinite(scale))
    scale[unsized] = np.fmax(sketch_norms(sketch_a[unsized]), sketch_norms(sketch_b[unsized]))
    shape_a = layouts_a.shape[a.layout[rows_a]]
    shape_b = layouts_b.shape[b.layout[rows_b]]
    known = (shape_a == shape_b) & same_nonfinite(a, b, rows_a, rows_b)
    stored = layouts_a.stored[a.layout[rows_a]] | layouts_b.stored[b.layout[rows_b]]
    for at in np.flatnonzero(stored).tolist():
        known[at] &= a.text[int(rows_a[at])] == b.text[int(rows_b[at])]
    least = _least_distances(a, b, rows_a, rows_b, np.abs(size_a - size_b), layouts_a)
    with np.errstate(invalid="ignore"):  # two changes that fell into one place of the sketch, and cancelled
        distance = np.where((least > 2 * distance) & (least > _EXACT * scale), least, distance)
    beside = [np.asarray(a.counts[name])[rows_a] > 0 for name in _NOT_FINITE if name in a.counts]
    if beside:  # where all that is finite is equal, what differs is where the rest is
        known &= (distance > 0) | ~np.logical_or.reduce(beside)
    return np.where(known, distance, np.nan), scale


def _least_distances(a: StepBatch, b: StepBatch, rows_a: Ids, rows_b: Ids, sizes: Floats, layouts: Layouts) -> Floats:
    """Lower bound of each pair's L2 distance, from the norms, extrema and means on record; NaN where none is.

    Args:
        a: records of run a.
        b: records of run b.
        rows_a: rows of `a`.
        rows_b: rows of `b`, one for each of `rows_a`.
        sizes: difference of each pair's L2 norms; NaN where unknown.
        layouts: of run a.
    """
    least = sizes
    for name, root in (("min", 1.0), ("max", 1.0), ("mean", np.sqrt(layouts.numel[a.layout[rows_a]]))):
        if name in a.floats and name in b.floats:
            one, two = (np.asarray(batch.floats[name], np.float64)[rows] for batch, rows in ((a, rows_a), (b, rows_b)))
            with np.errstate(invalid="ignore", over="ignore"):
                least = np.fmax(least, root * np.abs(one - two))
    return least


def relative(distance: Floats, scale: Floats) -> Floats:
    """`distance` over `scale`, element by element; 0 where both are 0, NaN where the distance is unknown."""
    with np.errstate(invalid="ignore", divide="ignore"):
        ratio = distance / scale
    return np.where((distance == 0) & (scale == 0), 0.0, ratio)


def same_nonfinite(a: StepBatch, b: StepBatch, rows_a: Ids, rows_b: Ids) -> Mask:
    """Mask of pairs of rows with equal numbers of NaN, +inf and -inf.

    What either batch did not count does not matter.
    """
    same = np.ones(len(rows_a), dtype=np.bool_)
    for name in _NOT_FINITE:
        if name in a.counts and name in b.counts:
            same &= np.asarray(a.counts[name])[rows_a] == np.asarray(b.counts[name])[rows_b]
    return same


def rounding(rel: float, dtype_a: str, dtype_b: str) -> tuple[float, str] | None:
    """A relative distance in roundings: (how many, of which dtype); None where it is too far for that.

    At most 64 roundings of the coarser dtype. For a larger distance 0.2 to 1.2 roundings of bfloat16, if both dtypes
    are finer: something was computed in it. None too for a distance of 0, or if neither dtype is a float.
    """
    units = [name for name in (dtype_a, dtype_b) if name in ROUNDING]
    if not units or rel <= 0:
        return None
    layout = max(units, key=lambda name: ROUNDING[name])
    k = rel / ROUNDING[layout]
    if k <= 64:
        return k, layout
    k = rel / ROUNDING["bfloat16"]
    return (k, "bfloat16") if 0.2 <= k <= 1.2 and ROUNDING[layout] < ROUNDING["bfloat16"] else None


def _widened(values: Any) -> npt.NDArray[Any] | None:
    """An array as float64, or complex128 if it is complex; None if its dtype is not numeric."""
    array = np.asarray(values)
    if array.dtype.kind in "biuf":
        return array.astype(np.float64)
    return array.astype(np.complex128) if array.dtype.kind == "c" else None


def distance_of(a: npt.NDArray[Any], b: npt.NDArray[Any]) -> float | None:
    """Relative L2 distance of two whole tensors of one shape: over the larger of their norms, 0 if both are 0.

    Elements that are not finite in one or both are left out; None where these are not the same in both (NaN equals
    NaN), or a dtype is not numeric.
    """
    one, two = _widened(a), _widened(b)
    if one is None or two is None:
        return None
    one, two = one.ravel(), two.ravel()
    finite = np.isfinite(one) & np.isfinite(two)
    if not np.array_equal(one[~finite], two[~finite], equal_nan=True):
        return None
    one, two = one[finite], two[finite]
    scale = max(float(np.linalg.norm(one)), float(np.linalg.norm(two)))
    return 0.0 if scale == 0 else float(np.linalg.norm(one - two)) / scale


@dataclass(frozen=True)
class Tensors:
    """Looks up whole tensors in the stores of both runs; each look-up reads a file."""

    a: Run
    b: Run

    def both(
        self, checksum_a: int, checksum_b: int, shape: tuple[int, ...]
    ) -> tuple[npt.NDArray[Any], npt.NDArray[Any]] | None:
        """(tensor of a, tensor of b) with these checksums.

        None where either was not stored, has checksum 0 or not this shape.
        """
        if not checksum_a or not checksum_b:
            return None
        a = self.a.tensor(checksum_a)
        b = self.b.tensor(checksum_b) if a is not None else None
        return (a, b) if a is not None and b is not None and a.shape == b.shape == shape else None


Held = tuple[int, int]
"""How several ranks' records became one (`Joined`), and how many ranks have one value."""


def shapes_differ(a: Summary, b: Summary) -> bool:
    """Whether two records cannot be of one tensor, by their shapes.

    Values gathered from ranks need only have as many elements as the other; a value equal on all ranks may be a part of
    the other (`other_shapes`).
    """
    return other_shapes((a.layout, b.layout), ((a.joined, a.ranks), (b.joined, b.ranks)))


def is_shapeless(summary: Summary) -> bool:
    """Whether a value was gathered from several ranks at unknown places in the whole, so that it has no shape."""
    return summary.joined is Joined.GATHERED and summary.status is Status.OBSERVED


def other_shapes(layouts: tuple[Layout, Layout], held: tuple[Held, Held]) -> bool:
    """Whether two values cannot be one tensor, by their shapes.

    If either is gathered: whether they have other numbers of elements. Else whether their shapes differ, except where
    one is a value equal on all ranks that may be a part of the other (`_may_be_parts`).

    Args:
        layouts: of a's value and of b's.
        held: of each, how ranks' records became it, and how many ranks have it.
    """
    one, two = layouts
    if one.shape == two.shape:
        return False
    if Joined.GATHERED in {joined for joined, _ in held}:
        return one.numel != two.numel
    return not (_may_be_parts(one, held[0], two) or _may_be_parts(two, held[1], one))


def _may_be_parts(part: Layout, held: Held, whole: Layout) -> bool:
    """Whether values of layout `part`, equal on all ranks (ALIKE), may be parts of a value of layout `whole`.

    They may if `whole` has n times the elements, n whole, and n divides the number of ranks.

    Args:
        part: layout of each rank's value.
        held: how these were joined, and the number of ranks.
        whole: layout of the other run's value.
    """
    joined, ranks = held
    times, rest = divmod(whole.numel, max(part.numel, 1))
    return joined == Joined.ALIKE and rest == 0 < times and ranks % times == 0
