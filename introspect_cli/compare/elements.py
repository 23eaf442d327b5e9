"""Two whole tensors compared element by element: how many differ, by how much, where, and by which relation.

The places that differ are matched with patterns that faults have: a range of columns, one sample, every fourth element.
A pattern is told only where it holds of every place that differs; "every element there" only where nothing in it is
equal.

Equal means the same bits: -0.0 differs from 0.0. A NaN equals a NaN, since numpy has no payloads to show. Distance is
counted in units in the last place (ULP), one representable number to the next. Rounding moves results by a few; a fault
moves them by thousands.

A relation (a factor, a narrower type, another order) is told only where it holds of every element that differs, or of
the whole tensors; a factor to a few roundings of the dtype.

The picture is a grid of cells; a cell shows the largest difference in it, so that a single element is never lost.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from introspect_cli.derived import ROUNDING

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Mask = NDArray[np.bool_]

ROWS, COLUMNS = 48, 96
"""The most cells of a picture."""

SIGN = 5e-324
"""What the sign of a zero, which differs by nothing, is shown as where nothing else differs."""


@dataclass(frozen=True)
class Picture:
    """A grid of cells over a tensor laid out as rows and columns.

    Attributes:
        rows: the sizes of the dimensions of the tensor that the rows count through.
        columns: the same of the columns.
        tile: rows and columns of the tensor in a cell, at most.
        cells: a row of cells each; a cell is 0.0 where all is equal, the largest |a - b| in it otherwise, infinite
            where one of the two is not finite.
    """

    rows: tuple[int, ...]
    columns: tuple[int, ...]
    tile: tuple[int, int]
    cells: tuple[tuple[float, ...], ...]


def picture_of(distances: NDArray[np.float64], mask: NDArray[Any]) -> Picture:
    """A grid of the largest differences, coarse enough for `ROWS` by `COLUMNS` cells.

    Rows are all dimensions but the last. A difference of size 0 (the sign of a zero) is shown as the smallest other
    one, or as `SIGN`. A tensor without elements is one cell of 0.

    Args:
        distances: |a - b| of each element.
        mask: which elements differ; of the same shape.
    """
    above = distances[mask & (distances > 0)]
    shown = np.where(mask, np.maximum(distances, float(above.min()) if len(above) else SIGN), 0.0)
    rows, columns = (mask.shape[:-1] or (1,), mask.shape[-1:] or (1,)) if shown.size else ((1,), (1,))
    grid = (shown if shown.size else np.zeros(1)).reshape(math.prod(rows), math.prod(columns))
    tile = -(-grid.shape[0] // ROWS), -(-grid.shape[1] // COLUMNS)
    for axis, size in enumerate(tile):
        grid = np.maximum.reduceat(grid, np.arange(0, grid.shape[axis], size), axis=axis)
    return Picture(rows, columns, tile, tuple(tuple(map(float, row)) for row in grid))


# --- element by element


_LAST_BIN = 24

LARGEST = 6
"""How many of the largest differences are listed."""

_MOST_LISTED = 6


@dataclass(frozen=True)
class Elements:
    """Number, size and place of the differences of two tensors of one shape.

    Attributes:
        total: elements of each.
        differing: how many differ.
        largest: largest |a - b| over the elements finite in both; None where there are none.
        where: index of that element.
        first: index of the first element that differs, in row-major order.
    """

    total: int
    differing: int
    largest: float | None
    where: tuple[int, ...]
    first: tuple[int, ...]


@dataclass(frozen=True)
class TensorDifference:
    """Full element-wise comparison of two tensors of one shape.

    Attributes:
        elements: how many differ, and where first and most.
        largest: the largest differences, the largest first: index, value in a, value in b.
        where: clauses on which elements differ; empty where they have no shape that is known here.
        relation: clauses on how b follows from a.
        ulps: how many elements differ by how many units in the last place: the bins' lower ends and counts.
        unit: the dtype whose units these are; "" where there are none.
        picture: where, as a grid.
    """

    shape: tuple[int, ...]
    elements: Elements
    largest: tuple[tuple[tuple[int, ...], complex, complex], ...]
    where: tuple[str, ...]
    relation: tuple[str, ...]
    ulps: tuple[tuple[int, int], ...]
    unit: str
    picture: Picture


def differing(a: NDArray[Any], b: NDArray[Any]) -> Mask:
    """Mask of unequal elements, flat in row-major order; NaN equals NaN, -0.0 differs from 0.0 (in real numbers only).

    Arrays of two dtypes are compared by value alone, so that NaN differs and signs of zeros do not.
    """
    a, b = np.ascontiguousarray(a).reshape(-1), np.ascontiguousarray(b).reshape(-1)
    if a.dtype != b.dtype:
        return np.asarray(a != b)
    differs = np.asarray(a != b)
    if a.dtype.kind in "fc":
        differs &= ~(np.isnan(a) & np.isnan(b))
        if a.dtype.kind == "f":
            differs |= (a == b) & (np.signbit(a) != np.signbit(b))
    return differs


def index_of(flat: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Index in an array of this shape of position `flat` in row-major order; () for a scalar."""
    return tuple(int(at) for at in np.unravel_index(flat, shape)) if shape else ()


def elements(a: NDArray[Any], b: NDArray[Any]) -> Elements | None:
    """How many elements differ (`differing`), the first, and the farthest finite one, in a tie the first.

    Indices are () and `largest` is None where there is no such element. None if shapes differ or a dtype is not
    numeric.
    """
    if a.shape != b.shape or a.dtype.kind not in "biufc" or b.dtype.kind not in "biufc":
        return None
    mask = differing(a, b)
    places = np.flatnonzero(mask)
    distances = _distances(*(np.ascontiguousarray(side).reshape(-1)[places] for side in (a, b)))
    finite = np.flatnonzero(np.isfinite(distances))
    best = finite[np.argmax(distances[finite])] if len(finite) else None
    return Elements(
        total=int(mask.size),
        differing=len(places),
        largest=None if best is None else float(distances[best]),
        where=() if best is None else index_of(int(places[best]), a.shape),
        first=index_of(int(places[0]), a.shape) if len(places) else (),
    )


def difference(a: NDArray[Any], b: NDArray[Any], dtypes: tuple[str, str]) -> TensorDifference | None:
    """Full comparison of two arrays; None if shapes differ or a dtype is not numeric.

    Args:
        a: tensor of run a.
        b: tensor of run b.
        dtypes: what they were recorded as; bfloat16 comes as float32.
    """
    largest = elements(a, b)
    if largest is None:
        return None
    mask = differing(a, b).reshape(a.shape)
    distances = _distances(a, b)
    bins, unit = ulp_bins(a, b, dtypes)
    return TensorDifference(
        shape=a.shape,
        elements=largest,
        largest=_largest_differences(a, b, distances, mask),
        where=where(mask) if largest.differing else (),
        relation=relation(a, b, mask) if largest.differing else (),
        ulps=bins,
        unit=unit,
        picture=picture_of(distances, mask),
    )


def _distances(a: NDArray[Any], b: NDArray[Any]) -> NDArray[np.float64]:
    """|a - b| of each element as float64; infinite where it is not finite, as with NaN in one or both."""
    wide = np.complex128 if "c" in (a.dtype.kind, b.dtype.kind) else np.float64
    with np.errstate(all="ignore"):
        distances = np.abs(a.astype(wide) - b.astype(wide))
    return np.where(np.isfinite(distances), distances, np.inf)


def _largest_differences(
    a: NDArray[Any], b: NDArray[Any], distances: NDArray[np.float64], mask: Mask
) -> tuple[tuple[tuple[int, ...], complex, complex], ...]:
    """The `LARGEST` largest differences of elements in `mask`, the largest first: (index, value in a, value in b).

    Those with NaN or infinity count as the largest; of equal ones, the first in row-major order.
    """
    places = np.flatnonzero(mask)
    order = places[np.argsort(-distances.reshape(-1)[places], kind="stable")[:LARGEST]]
    indices = [index_of(flat, a.shape) for flat in order.tolist()]
    return tuple((index, a[index].item(), b[index].item()) for index in indices)


def ulp_bins(a: NDArray[Any], b: NDArray[Any], dtypes: tuple[str, str]) -> tuple[tuple[tuple[int, int], ...], str]:
    """(bins, their dtype): how many finite elements differ by how many ULPs of the smaller one, in the coarser dtype.

    Bins hold 1, 2, 3 to 4, 5 to 8 ULPs and so on, the last all above 2^23. Each is (the lowest number of ULPs in it,
    number of elements), ascending; empty ones are left out. ((), "") where either dtype is no float.

    Args:
        a: tensor of run a.
        b: tensor of run b.
        dtypes: what a and b were recorded as; bfloat16 comes as float32.
    """
    if dtypes[0] not in ROUNDING or dtypes[1] not in ROUNDING:
        return (), ""
    unit, finite = max(dtypes, key=ROUNDING.__getitem__), np.isfinite(a) & np.isfinite(b)
    one, two = (rounded(side[finite], unit) for side in (a, b))
    with np.errstate(all="ignore"):
        ulp = np.spacing(np.minimum(np.abs(one), np.abs(two))).astype(np.float64)
        ulps = np.abs(one.astype(np.float64) - two) / (ulp * 2.0**16 if unit == "bfloat16" else ulp)
        bins = np.minimum(np.ceil(np.log2(np.maximum(ulps[ulps > 0], 1))), _LAST_BIN).astype(np.int64)
    counts = np.bincount(bins, minlength=1)
    lowest = [1, *(2**power + 1 for power in range(_LAST_BIN))]
    return tuple((lowest[place], int(counts[place])) for place in np.flatnonzero(counts).tolist()), unit


def ulp_words(lowest: int) -> str:
    """The bin that begins with `lowest` ULPs, in words: `1`, `3 to 4`, `over 8,388,608`."""
    if lowest <= 2:
        return str(lowest)
    highest = 2 * (lowest - 1)
    return f"over {lowest - 1:,}" if highest == 2**_LAST_BIN else f"{lowest:,} to {highest:,}"


def rounded(values: NDArray[Any], dtype: str) -> NDArray[Any]:
    """Values rounded to a float `dtype`, to bfloat16 as float32; to nearest, ties to even.

    For bfloat16, float64 is rounded to float32 first. Too large ones become infinite; NaNs and infinities stay.
    """
    with np.errstate(over="ignore"):
        if dtype != "bfloat16":
            return values.astype(dtype)
        single = np.ascontiguousarray(values.astype(np.float32))
    bits: Any = single.view(np.uint32).astype(np.uint64)
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
    return np.where(np.isfinite(single), bits.astype(np.uint32).view(np.float32), single).astype(np.float32)


# --- which elements


def where(mask: Mask) -> tuple[str, ...]:
    """Clauses on which indices differ, one for each dimension that has a pattern: ranges, strides, single ones.

    Each is true of all elements that differ. One clause alone if all elements differ, or one does. () where no pattern
    fits, and for a tensor of one element. At least one element has to differ.
    """
    places = np.flatnonzero(mask)
    if mask.size == 1:
        return ()
    if len(places) == mask.size:
        return ("all of them",)
    if len(places) == 1:
        return (f"one element alone, {list(index_of(int(places[0]), mask.shape))}",)
    boxed = [np.flatnonzero(mask.any(axis=tuple(d for d in range(mask.ndim) if d != dim))) for dim in range(mask.ndim)]
    narrow = [(dim, hit) for dim, hit in enumerate(boxed) if len(hit) < mask.shape[dim]]
    clauses = [clause for dim, hit in narrow if (clause := _dimension_clause(dim, hit, mask.shape))]
    if math.prod(len(hit) for hit in boxed) != len(places):
        return tuple(clauses)
    return (*clauses[:-1], f"{clauses[-1]}, every element there") if clauses else ()


def _dimension_clause(dim: int, hit: NDArray[np.intp], shape: tuple[int, ...]) -> str:
    """Clause on the indices in one dimension at which anything differs; "" where it has no pattern.

    Patterns are one index, a range, four or more at one distance, or at most `_MOST_LISTED` indices, which are listed.

    Args:
        dim: the dimension.
        hit: the indices, sorted.
        shape: of the tensor.
    """
    strides, at = set(np.diff(hit).tolist()), hit.tolist()
    name = ("row", "column")[dim] + "s" * bool(strides) if len(shape) == 2 else f"dimension {dim} at"
    if strides == {1}:
        text = f"{at[0]} to {at[-1]}"
    elif len(strides) == 1 and len(at) > 3:
        text = f"{at[0]}, {at[1]}, ... {at[-1]}"
    else:
        text = ", ".join(map(str, at)) if len(at) <= _MOST_LISTED else ""
    return text and f"{name} {text} (of {shape[dim]:,})"


# --- how one follows from the other


def relation(a: NDArray[Any], b: NDArray[Any], mask: Mask) -> tuple[str, ...]:
    """Clauses on how b follows from a, each true of all elements that differ or of the whole tensors.

    () where none holds, and for complex numbers.

    Args:
        a: tensor of run a.
        b: tensor of run b.
        mask: which elements differ.
    """
    if a.dtype.kind not in "biuf" or b.dtype.kind not in "biuf":
        return ()
    one, two = a[mask].astype(np.float64), b[mask].astype(np.float64)
    with np.errstate(all="ignore"):
        clauses = (
            _constant_clause(one, two),
            _proportion_clause(one, two, a.dtype),
            _precision_clause(a, b),
            _order_clause(a, b),
        )
        return tuple(filter(None, clauses))


def _constant_clause(one: NDArray[np.float64], two: NDArray[np.float64]) -> str:
    """Clause where one of the two alone has one value (0, NaN) in all of two or more elements that differ; else ""."""
    alike = [len(np.unique(side)) == 1 for side in (one, two)]
    name, side = ("a", one) if alike[0] else ("b", two)
    return f"{name} is {side[0] + 0.0:.6g} in all of them" if alike[0] != alike[1] else ""


def _proportion_clause(one: NDArray[np.float64], two: NDArray[np.float64], dtype: np.dtype[Any]) -> str:
    """Clause where every element of b is one factor times that of a, to 4 roundings of `dtype`; "" otherwise.

    "" for fewer than 4 elements or 3 values of a, and where the factor is 0, or 1 to 64 roundings.

    Args:
        one: the differing elements of a.
        two: the same of b.
        dtype: of a.
    """
    if len(one) < 4 or len(np.unique(one)) < 3:
        return ""
    tiny = float(np.finfo(dtype).eps) if dtype.kind == "f" else 2.0**-52
    factor = float(np.median((two / one)[one != 0]))
    fits = (np.abs(two - factor * one) <= 4 * tiny * np.abs(two)).all()
    return f"b is {factor:.7g} times a" if factor and fits and abs(factor - 1) > 64 * tiny else ""


def _precision_clause(a: NDArray[Any], b: NDArray[Any]) -> str:
    """Clause where one float32 tensor is the other rounded to bfloat16 or float16, bit for bit; "" otherwise.

    Whole tensors are compared, not only elements that differ.
    """
    for name in ("bfloat16", "float16") if a.dtype == b.dtype == np.float32 else ():
        for fine, coarse, which in ((a, b, "b is a"), (b, a, "a is b")):
            if not differing(rounded(fine, name), coarse).any():
                return f"{which} rounded to {name}"
    return ""


def _order_clause(a: NDArray[Any], b: NDArray[Any]) -> str:
    """Clause where b has exactly the values of a in another order; "" otherwise.

    "" for fewer than 4 elements or 3 values, with NaNs, or for two dtypes.
    """
    ordered = a.dtype == b.dtype and np.array_equal(np.sort(a, axis=None), np.sort(b, axis=None))
    if a.size < 4 or not ordered or len(np.unique(a)) < 3:
        return ""
    return "b holds the values of a in another order"
