"""How far two records, or two tensors, are apart, and whether that may be rounding.

*Distance* is exact where both runs stored the whole tensors. Otherwise estimated from sketches, a linear map to 16
numbers: the norm of the difference of two sketches is 0.76 to 1.32 of the tensors' L2 distance (5th and 95th
percentile). Relative to the larger of the two exact L2 norms: symmetric, defined when either is zero, and at most 2.

Values of different shapes have no distance. Values gathered from ranks without a known place have no shape, and equal
values on all ranks may be copies or equal parts: only their sizes can differ.

*Size* is a class: rounding of its dtype, more than rounding, or structural. Rounding means: as far apart as another
order of the same sums makes two correctly computed values. Of a sum of n products that is, with a probability near 1,
at most a small multiple of sqrt(n) u relative to the values that go in, where u is the dtype's unit roundoff (Higham
and Mary, A New Approach to Probabilistic Rounding Error Analysis, SIAM J. Sci. Comput. 41(5), 2019; the certain bound
is n u: Higham, Accuracy and Stability of Numerical Algorithms, 4.2). So two values are a rounding apart where

    relative L2 <= 4 sqrt(max(n, 256)) u, and <= 0.05,

and minimum, maximum and mean agree to that as well: an L2 distance does not see small values beside huge ones. The 256
leave 64 u to what is no sum, for an exponential or a quotient of such is not rounded once either. n is the number of
terms of the reduction as far as the records tell: of a parameter's gradient the elements of its module's output
gradient for each of its own rows (samples, tokens), of a module's output its parameters' elements for each row (the
fan-in), else 256. Where terms cancel, a sum may be further off and still be rounding; that is called more than
rounding, and `capture --perturb` measures it.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from introspect_cli.compare.result import RESOLUTION, Size
from introspect_cli.derived import ROUNDING, l2_norm, scale_between
from introspect_cli.records import Joined, Layout, Status, Summary

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from introspect_cli.store.batch import StepBatch

Ids = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]
Floats = npt.NDArray[np.float64]

_NOT_FINITE = ("nans", "posinfs", "neginfs")
_EXACT = 1e-5
"""How far statistics are to be trusted, relative to the norm."""


class Layouts:
    """Properties of one rank's layouts as arrays indexed by layout number; those of no layouts have one element.

    Attributes:
        numel: float64, number of elements.
        floating: bool, whether sums of the dtype are rounded.
        unit: float64, unit roundoff of the coarsest dtype; 0 for dtypes without rounding.
        dtype: int64, a number per dtype, the same in all `Layouts` of the process.
        stored: bool, whether the tensor is sparse, jagged or nested.
        dims: int64, number of dimensions.
        shape: int64, a number per shape, the same in all `Layouts` of the process.
    """

    def __init__(self, layouts: Sequence[Layout]) -> None:
        """Compute all arrays now; new shapes and dtypes get numbers in `_NUMBERS`, which all instances share."""

        def column(of: Callable[[Layout], object], dtype: Any) -> Any:
            """What `of` gives of each layout, as an array."""
            return np.array([of(layout) for layout in layouts] or [0], dtype)

        self.numel = column(lambda layout: max(layout.numel, 0), np.float64)
        self.floating = column(lambda layout: layout.dtype.startswith(("float", "bfloat", "complex")), np.bool_)
        # ranks that compute in several dtypes have them all in one layout: `float32 and bfloat16`
        self.unit = column(lambda layout: max(ROUNDING.get(of, 0.0) for of in layout.dtype.split(" and ")), np.float64)
        self.dtype = column(lambda layout: _NUMBERS.setdefault(layout.dtype, len(_NUMBERS)), np.int64)
        # of sparse and nested ones, statistics and sketch have the values, and not where they stand
        self.stored = column(lambda layout: layout.strides.startswith(("sparse", "jagged", "nested")), np.bool_)
        self.dims = column(lambda layout: len(layout.shape), np.int64)
        self.shape = column(lambda layout: _NUMBERS.setdefault(tuple(layout.shape), len(_NUMBERS)), np.int64)


_NUMBERS: dict[object, int] = {}  # of shapes and dtypes, so that those of two runs compare as integers


@dataclass(frozen=True, eq=False)
class Records:
    """Some records of a run's step, as columns.

    Attributes:
        batch: all records of the step.
        rows: which of them.
        layouts: of the run.
    """

    batch: StepBatch
    rows: Ids
    layouts: Layouts

    def layout(self, name: str) -> Any:
        """Attribute `name` of `Layouts` (`numel`, `shape`) of each record."""
        return getattr(self.layouts, name)[self.batch.layout[self.rows]]

    def column(self, name: str, missing: int = 0) -> Any:
        """Column `name` of the batch (`status`, `calls`) of each record; `missing` where the batch has none."""
        values = getattr(self.batch, name)
        return np.full(len(self.rows), missing) if values is None else np.asarray(values)[self.rows]

    def statistic(self, name: str) -> Floats:
        """Statistic `name` (`mean`, `min`) of each record, float64; NaN where the batch has none."""
        values = self.batch.floats.get(name)
        return np.full(len(self.rows), np.nan) if values is None else np.asarray(values, np.float64)[self.rows]

    def count(self, name: str) -> Ids:
        """How many elements of each record are so (`nans`); -1 where the batch did not count them."""
        values = self.batch.counts.get(name)
        return np.full(len(self.rows), -1) if values is None else np.asarray(values, np.int64)[self.rows]

    @property
    def lacks_sketch(self) -> Mask:
        """Whether each record has no sketch: none was wanted, or its step was lean."""
        sketch = self.batch.sketch
        return np.asarray(np.isnan(sketch[self.rows]).all(axis=1) if sketch is not None else self.rows >= 0)

    @cached_property
    def norms(self) -> Floats:
        """L2 norm of the finite elements of each record's tensor, float64, from mean and variance.

        NaN for sparse, jagged and nested tensors, and where NaNs, means or variances are not on record.
        """
        odd = np.sum([self.count(name) for name in _NOT_FINITE], axis=0)
        numel = np.where(self.layout("stored") | (odd < 0), np.nan, self.layout("numel") - odd)
        with np.errstate(invalid="ignore", over="ignore"):
            return l2_norm(self.statistic("mean"), self.statistic("var"), numel)


def nan_throughout(batch: StepBatch, layouts: Layouts) -> Mask:
    """Mask over all rows of the batch, true where every element is NaN; all False if NaNs were not counted.

    False for tensors without elements.
    """
    every = Records(batch, np.arange(len(batch)), layouts)
    return np.asarray((every.count("nans") == every.layout("numel")) & (every.layout("numel") > 0))


def distances(one: Records, two: Records) -> tuple[Floats, Floats]:
    """(estimated L2 distance, larger of the two L2 norms) of each pair of records, both float64 (n,).

    Norms are from statistics, else from sketches. The distance is NaN without sketches, and where it is unknown:
    another shape, unequal counts of NaNs or infinities, sparse tensors with other places, or equal finite elements
    beside some that are not finite. A bound from the statistics stands in for the sketches' estimate where it is more
    than twice that.

    Args:
        one: of run a.
        two: as many of run b.
    """
    scale = np.fmax(one.norms, two.norms)
    if not len(scale) or one.batch.sketch is None or two.batch.sketch is None:
        return np.full(len(scale), np.nan), scale
    sketches = np.array([of_run.column("sketch") for of_run in (one, two)], np.float64)
    distance = np.linalg.norm(sketches[0] - sketches[1], axis=1)
    unsized = np.flatnonzero(~np.isfinite(scale))
    scale[unsized] = np.fmax(*np.linalg.norm(sketches[:, unsized], axis=2))
    known = (one.layout("shape") == two.layout("shape")) & same_nonfinite(one, two)
    for at in np.flatnonzero(one.layout("stored") | two.layout("stored")).tolist():
        known[at] &= one.batch.text[int(one.rows[at])] == two.batch.text[int(two.rows[at])]
    least = least_distances(one, two)
    with np.errstate(invalid="ignore"):
        # two changes that fell into one place of the sketch, and cancelled
        distance = np.where((least > 2 * distance) & (least > _EXACT * scale), least, distance)
    # where all that is finite is equal, what differs is where the rest is
    known &= (distance > 0) | (np.array([one.count(name) for name in _NOT_FINITE]) <= 0).all(axis=0)
    return np.where(known, distance, np.nan), scale


def least_distances(one: Records, two: Records) -> Floats:
    """What the L2 distance of each pair of records is at least, by their norms, extrema and means: float64 (n,)."""
    with np.errstate(invalid="ignore", over="ignore"):
        least = np.abs(one.norms - two.norms)
        for name, root in (("min", 1.0), ("max", 1.0), ("mean", np.sqrt(one.layout("numel")))):
            least = np.fmax(least, root * np.abs(one.statistic(name) - two.statistic(name)))
    return np.asarray(least)


def relative(distance: Floats, scale: Floats) -> Floats:
    """`distance` over `scale`, element by element; 0 where both are 0, NaN where the distance is unknown."""
    with np.errstate(invalid="ignore", divide="ignore"):
        ratio = distance / scale
    return np.where((distance == 0) & (scale == 0), 0.0, ratio)


def same_nonfinite(one: Records, two: Records) -> Mask:
    """Mask of pairs of records with equal numbers of NaN, +inf and -inf.

    What either run did not count does not matter.
    """
    counts = [(one.count(name), two.count(name)) for name in _NOT_FINITE]
    return np.asarray(np.logical_and.reduce([(a == b) | (a < 0) | (b < 0) for a, b in counts]))


def distance_of(a: npt.NDArray[Any], b: npt.NDArray[Any]) -> float:
    """Relative L2 distance of two whole tensors of one shape: over the larger of their norms, 0 if both are 0.

    Elements that are not finite in one or both are left out; NaN where these are not the same in both (NaN equals
    NaN), or a dtype is not numeric.
    """
    kinds = a.dtype.kind + b.dtype.kind
    if kinds.strip("biufc"):
        return np.nan
    one, two = (side.ravel().astype(np.complex128 if "c" in kinds else np.float64) for side in (a, b))
    finite = np.isfinite(one) & np.isfinite(two)
    if not np.array_equal(one[~finite], two[~finite], equal_nan=True):
        return np.nan
    one, two = one[finite], two[finite]
    scale = max(float(np.linalg.norm(one)), float(np.linalg.norm(two)))
    return 0.0 if scale == 0 else float(np.linalg.norm(one - two)) / scale


def plain_distance(one: str, two: str) -> tuple[float, float]:
    """(absolute difference, larger absolute value) of two texts that are numbers; NaN of others."""
    with suppress(ValueError):
        a, b = float(one), float(two)
        return 0.0 if a == b else abs(a - b), max(abs(a), abs(b))
    return np.nan, np.nan


def shapes_differ(a: Summary, b: Summary) -> bool:
    """Whether two records cannot be of one tensor, by their shapes.

    Values gathered from ranks need only have as many elements as the other; a value equal on all ranks (ALIKE) may be
    one of several parts of the other.
    """
    if a.layout.shape == b.layout.shape:
        return False
    part, whole = sorted((a, b), key=lambda side: side.layout.numel)
    if Joined.GATHERED in (a.joined, b.joined):
        return part.layout.numel != whole.layout.numel
    return part.joined is not Joined.ALIKE or whole.layout.numel % max(part.layout.numel, 1) != 0


# --- rounding, or more

_MIN_TERMS = 256
_SAFETY_FACTOR = 4.0
_MAX_BOUND = 0.05
"""No more than that: half precision adds up in float32, and rounds a sum a few times."""

LEAST_BOUND = _SAFETY_FACTOR * _MIN_TERMS**0.5
"""Roundings that two values may be apart whatever they are made of."""


def size_of(
    a: Summary | None, b: Summary | None, rel: float | None, terms: int = 0, scale: float | None = None
) -> Size | None:
    """The size class of a divergence: STRUCTURAL, MORE or ROUNDING.

    STRUCTURAL: one run has no record, or status, shape or dtype differ, or two texts are not both numbers. MORE: beyond
    4 sqrt(max(terms, 256)) roundings (at most 0.05) in distance, minimum, maximum or mean, or NaN or infinite; of a
    dtype without rounding, always. None: the distance is unknown and nothing is infinite, or a statistic is not known.

    Args:
        a: what run a recorded; None where it has no record.
        b: what run b recorded; None where it has no record.
        rel: relative L2 distance; None where it is not known.
        terms: number of terms of the sum that gives the value; 0 where that is not known.
        scale: c where b is c times a, else None; with it, more than `LEAST_BOUND` roundings are MORE already.
    """
    if a is None or b is None or a.status is not b.status or shapes_differ(a, b):
        return Size.STRUCTURAL
    if a.layout.dtype != b.layout.dtype or (a.status is Status.VALUE and rel is None):
        return Size.STRUCTURAL
    unit = ROUNDING.get(a.layout.dtype)
    if unit is None or has_nonfinite(a.stats) or has_nonfinite(b.stats):
        return Size.MORE  # of integers and the like, nothing is rounded
    if rel is None:
        return None
    bound = min(_SAFETY_FACTOR * max(terms, _MIN_TERMS) ** 0.5 * unit, _MAX_BOUND)
    if rel > bound or (scale is not None and rel > LEAST_BOUND * unit):
        return Size.MORE
    one, two = moments(a), moments(b)
    if one is None or two is None:
        return None
    return Size.ROUNDING if moments_agree(one, two, bound) else Size.MORE


def proportion(sketch_a: npt.NDArray[Any], sketch_b: npt.NDArray[Any]) -> float | None:
    """The factor c where b is c times a by least squares over two sketches; None where it is not.

    That is, what is left is 20 `RESOLUTION` of b's norm or more, or c is within 50 `RESOLUTION` of 1.
    """
    factor, rest = scale_between(sketch_a, sketch_b)
    return factor if rest < 20 * RESOLUTION and abs(factor - 1) > 50 * RESOLUTION else None


def has_nonfinite(stats: Mapping[str, float]) -> bool:
    """Whether these statistics of a tensor count any NaN or infinity; False where they have no counts."""
    return any(stats.get(name, 0) for name in ("nans", "posinfs", "neginfs"))


# --- the same numbers in any order


class Moments(NamedTuple):
    """Statistics that follow from those of the parts when tensors are put together.

    Attributes:
        numel: number of elements.
        low: smallest value.
        high: largest value.
        least: smallest absolute value.
        total: sum.
        squares: sum of squares.
    """

    numel: int
    low: float
    high: float
    least: float
    total: float
    squares: float


def moments(summary: Summary) -> Moments | None:
    """Moments of a record, by its minimum, maximum, smallest absolute value, mean and variance.

    None where any of these is not on record or not finite, and where the tensor has NaNs or infinities.
    """
    low, high, least, mean, var = every = [summary.stats.get(name, np.nan) for name in _MOMENTS]
    if not np.isfinite(every).all() or has_nonfinite(summary.stats):
        return None
    numel = max(summary.layout.numel, 0)
    return Moments(numel, low, high, least, mean * numel, (var + mean * mean) * numel)


_MOMENTS = ("min", "max", "absmin", "mean", "var")


def same_numbers(one: Moments, two: Moments, close: float = 1e-6) -> bool:
    """Whether two tensors may hold the same numbers in any order: size and extrema equal, sums to `close`.

    Sums are taken in float64 of statistics that are right to 1e-6. False for constants.
    """
    return one[:4] == two[:4] and one.low != one.high and moments_agree(one, two, close)


def moments_agree(one: Moments, two: Moments, close: float) -> bool:
    """Whether the moments of two values of one size agree.

    Extrema to `close` times the largest of them, means to `close` times the root mean square; mean squares to 2
    `close`, relative to the larger.
    """
    size = (max(one.squares, two.squares) / one.numel) ** 0.5
    ends = max(abs(one.low - two.low), abs(one.high - two.high))
    return (
        ends <= close * max(size, abs(one.low), abs(one.high))
        and abs(one.total - two.total) <= close * size * one.numel
        and abs(one.squares - two.squares) <= 2 * close * max(one.squares, two.squares)
    )
