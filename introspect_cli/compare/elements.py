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
    from collections.abc import Iterator

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


def picture_of(distances: NDArray[np.float64], mask: Mask) -> Picture:
    """A grid of the largest differences, coarse enough for `ROWS` by `COLUMNS` cells.

    Rows are all dimensions but the last. A difference of size 0 (the sign of a zero) is shown as the smallest other
    one, or as `SIGN`.

    Args:
        distances: |a - b| of each element.
        mask: which elements differ, one at least; of the same shape.
    """
    least = distances[mask & (distances > 0)].min(initial=np.inf)
    shown = np.where(mask, np.maximum(distances, least if least < np.inf else SIGN), 0.0)
    rows, columns = mask.shape[:-1] or (1,), mask.shape[-1:] or (1,)
    grid = shown.reshape(math.prod(rows), math.prod(columns))
    tile = -(-grid.shape[0] // ROWS), -(-grid.shape[1] // COLUMNS)
    for axis, size in enumerate(tile):
        grid = np.maximum.reduceat(grid, np.arange(0, grid.shape[axis], size), axis=axis)
    return Picture(rows, columns, tile, tuple(map(tuple, grid.tolist())))


# --- element by element


_BINS = ("1", "2", *(f"{2**n + 1:,} to {2 ** (n + 1):,}" for n in range(1, 23)), f"over {2**23:,}")
"""Numbers of ULPs that are counted together: 2^(n-1) + 1 to 2^n."""

_MOST_LISTED = 6
"""How many of the largest differences, and of indices in a dimension, are listed."""


@dataclass(frozen=True)
class Elements:
    """Number, size and place of the differences of two tensors of one shape.

    Attributes:
        total: elements of each.
        differing: how many differ.
        largest: largest |a - b| over the elements that differ and are finite in both; None where there are none.
        where: index of that element.
    """

    total: int
    differing: int
    largest: float | None
    where: tuple[int, ...]


@dataclass(frozen=True)
class TensorDifference:
    """Full element-wise comparison of two tensors of one shape.

    Attributes:
        elements: how many differ, and where most.
        largest: the largest differences, the largest first: index, value in a, value in b.
        where: clauses on which elements differ; empty where they have no shape that is known here.
        relation: clauses on how b follows from a.
        ulps: how many elements differ by how many units in the last place: the bins in words and counts.
        unit: the dtype whose units these are; "" where there are none.
        picture: where, as a grid; None where none differs.
    """

    elements: Elements
    largest: tuple[tuple[tuple[int, ...], complex, complex], ...]
    where: tuple[str, ...]
    relation: tuple[str, ...]
    ulps: tuple[tuple[str, int], ...]
    unit: str
    picture: Picture | None


def differing(a: NDArray[Any], b: NDArray[Any]) -> Mask:
    """Mask of unequal elements; NaN equals NaN, -0.0 differs from 0.0 (in real numbers only).

    Arrays of two dtypes are compared by value alone, so that NaN differs and signs of zeros do not.
    """
    differs = np.asarray(a != b)
    if a.dtype == b.dtype and a.dtype.kind in "fc":
        differs = differs & ~(np.isnan(a) & np.isnan(b))
    if a.dtype == b.dtype and a.dtype.kind == "f":
        differs = differs | ((a == b) & (np.signbit(a) != np.signbit(b)))
    return np.asarray(differs)


def _index_of(flat: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Index in an array of this shape of position `flat` in row-major order; () for a scalar."""
    return tuple(int(at) for at in np.unravel_index(flat, shape))


def elements(a: NDArray[Any], b: NDArray[Any]) -> Elements | None:
    """How many elements differ (`differing`), and the farthest finite one, in a tie the first.

    `where` is () and `largest` None where there is no such element. None if shapes differ or a dtype is not numeric.
    """
    if a.shape != b.shape or a.dtype.kind not in "biufc" or b.dtype.kind not in "biufc":
        return None
    mask, distances = differing(a, b), _distances(a, b)
    finite = np.where(mask & np.isfinite(distances), distances, -1.0)
    largest = float(finite.max(initial=-1.0))
    where = _index_of(int(finite.argmax()), a.shape) if largest >= 0 else ()
    return Elements(mask.size, int(mask.sum()), largest if largest >= 0 else None, where)


def difference(a: NDArray[Any], b: NDArray[Any], dtypes: tuple[str, str]) -> TensorDifference | None:
    """Full comparison of two arrays; None if shapes differ or a dtype is not numeric.

    Args:
        a: tensor of run a.
        b: tensor of run b.
        dtypes: what they were recorded as; bfloat16 comes as float32.
    """
    counted = elements(a, b)
    if counted is None:
        return None
    mask, distances = differing(a, b), _distances(a, b)
    places = np.flatnonzero(mask)  # NaN and infinity count as the largest; of equal ones, the first comes first
    places = places[np.argsort(-distances.reshape(-1)[places], kind="stable")[:_MOST_LISTED]]
    indices = [_index_of(flat, a.shape) for flat in places.tolist()]
    return TensorDifference(
        counted,
        tuple((index, a[index].item(), b[index].item()) for index in indices),
        where(mask),
        relation(a, b, mask),
        *ulp_bins(a, b, dtypes),
        picture_of(distances, mask) if indices else None,
    )


def _distances(a: NDArray[Any], b: NDArray[Any]) -> NDArray[np.float64]:
    """|a - b| of each element as float64; infinite where it is not finite, as with NaN in one or both."""
    wide = np.complex128 if "c" in (a.dtype.kind, b.dtype.kind) else np.float64
    with np.errstate(all="ignore"):
        distances = np.abs(a.astype(wide) - b.astype(wide))
    return np.where(np.isfinite(distances), distances, np.inf)


def ulp_bins(a: NDArray[Any], b: NDArray[Any], dtypes: tuple[str, str]) -> tuple[tuple[tuple[str, int], ...], str]:
    """(bins, their dtype): how many finite elements differ by how many ULPs of the smaller one, in the coarser dtype.

    Bins hold 1, 2, 3 to 4, 5 to 8 ULPs and so on, the last all above 2^23. Each is (its ULPs in words, number of
    elements), ascending; empty ones are left out. ((), "") where either dtype is no float.

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
        bins = np.minimum(np.ceil(np.log2(np.maximum(ulps[ulps > 0], 1))), len(_BINS) - 1).astype(np.int64)
    counts = np.bincount(bins, minlength=len(_BINS)).tolist()
    return tuple((words, number) for words, number in zip(_BINS, counts, strict=True) if number), unit


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

    Each is true of all elements that differ. One clause alone if all elements differ. () where no pattern fits, none
    differs, and for a tensor of one element.
    """
    number = int(mask.sum())
    if mask.size == 1 or number in {0, mask.size}:
        return ("all of them",) if number and mask.size > 1 else ()
    hits = [np.flatnonzero(mask.any(axis=tuple({*range(mask.ndim)} - {dim}))).tolist() for dim in range(mask.ndim)]
    clauses = [*filter(None, (_dimension_clause(dim, hit, mask.shape) for dim, hit in enumerate(hits)))]
    every = ", every element there" * (math.prod(map(len, hits)) == number)
    return (*clauses[:-1], f"{clauses[-1]}{every}") if clauses else ()


def _dimension_clause(dim: int, hit: list[int], shape: tuple[int, ...]) -> str:
    """Clause on the indices in one dimension at which anything differs; "" where all do, or they have no pattern.

    Patterns are one index, a range, four or more at one distance, or at most `_MOST_LISTED` indices, which are listed.

    Args:
        dim: the dimension.
        hit: the indices, sorted.
        shape: of the tensor.
    """
    strides = {*np.diff(hit).tolist()}
    text = ", ".join(map(str, hit)) if len(hit) <= _MOST_LISTED else ""
    if strides == {1}:
        text = f"{hit[0]} to {hit[-1]}"
    elif len(strides) == 1 and len(hit) > 3:
        text = f"{hit[0]}, {hit[1]}, ... {hit[-1]}"
    name = ("row", "column")[dim] + "s" * bool(strides) if len(shape) == 2 else f"dimension {dim} at"
    return f"{name} {text} (of {shape[dim]:,})" if text and len(hit) < shape[dim] else ""


# --- how one follows from the other


def relation(a: NDArray[Any], b: NDArray[Any], mask: Mask) -> tuple[str, ...]:
    """Clauses on how b follows from a, each true of all elements that differ or of the whole tensors.

    () where none holds or differs, and for complex numbers.

    Args:
        a: tensor of run a.
        b: tensor of run b.
        mask: which elements differ.
    """
    if a.dtype.kind not in "biuf" or b.dtype.kind not in "biuf" or not mask.any():
        return ()
    with np.errstate(all="ignore"):
        return tuple(_relations(a, b, a[mask].astype(np.float64), b[mask].astype(np.float64)))


def _relations(a: NDArray[Any], b: NDArray[Any], one: NDArray[np.float64], two: NDArray[np.float64]) -> Iterator[str]:
    """The clauses of `relation`, in order; `one` and `two` are the elements of a and b that differ."""
    # one of the two has one value (0, NaN) in all of two or more
    constant = [len(np.unique(side)) == 1 for side in (one, two)]
    if constant[0] != constant[1]:
        yield f"a is {one[0] + 0.0:.6g} in all of them" if constant[0] else f"b is {two[0] + 0.0:.6g} in all of them"
    # of few values any is a multiple of another; to 4 roundings of a's dtype, and not of 1 to 64
    if len(one) > 3 and len(np.unique(one)) > 2:
        tiny = float(np.finfo(a.dtype).eps) if a.dtype.kind == "f" else 2.0**-52
        factor = float(np.median((two / one)[one != 0]))
        fits = (np.abs(two - factor * one) <= 4 * tiny * np.abs(two)).all()
        if factor and fits and abs(factor - 1) > 64 * tiny:
            yield f"b is {factor:.7g} times a"
    # bit for bit, of the whole tensors
    for name in ("bfloat16", "float16") if a.dtype == b.dtype == np.float32 else ():
        for fine, coarse, which in ((a, b, "b is a"), (b, a, "a is b")):
            if not differing(rounded(fine, name), coarse).any():
                yield f"{which} rounded to {name}"
    same = a.dtype == b.dtype and np.array_equal(np.sort(a, axis=None), np.sort(b, axis=None))
    if same and a.size > 3 and len(np.unique(a)) > 2:
        yield "b holds the values of a in another order"
