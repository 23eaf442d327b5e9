"""Two whole tensors, element by element: how many differ, by how much, and where; and how one follows from the other.

Equal means the same bits, as everywhere: -0.0 differs from 0.0; a NaN equals a NaN here, since numpy has no payloads
to show. How far two floating point numbers are apart is counted in numbers that could stand between them: a unit in the
last place (ULP) is one representable number to the next. Rounding moves results by a few of them, whatever their size;
a fault moves them by thousands.

A relation (a factor, a summand, a narrower type, another order) is told only where it holds of every element that
differs, or of the whole tensors; a factor and a summand to a few roundings of the dtype. Where none holds, it may be
that nothing but rounding differs: another order of a sum moves its result by a few units in the last place, and by more
where large terms cancel. So the differences are held against the largest element.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Mask = NDArray[np.bool_]

_KEPT = 64

MANTISSA = {"float64": 52, "float32": 23, "float16": 10, "bfloat16": 7}
"""Bits after the point that a number of a dtype has."""

_LARGE_BIN = 24
_ROUNDINGS = 16
"""Units in the last place of the largest element up to which differences are of the size of rounding."""


@dataclass(frozen=True)
class Elements:
    """How two tensors of one shape differ.

    Attributes:
        total: elements of each.
        differing: how many differ.
        largest: largest |a - b| over the elements finite in both; None where there are none.
        where: index of that element.
        first: index of the first element that differs, in row-major order.
        rows: up to 64 differing elements in row-major order: index, value in a, value in b.
    """

    total: int
    differing: int
    largest: float | None
    where: tuple[int, ...]
    first: tuple[int, ...]
    rows: tuple[tuple[tuple[int, ...], complex, complex], ...]


def differing(a: NDArray[Any], b: NDArray[Any]) -> Mask:
    """Where two arrays of one shape differ, row-major and flat."""
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
    """The index of an element that is counted through."""
    return tuple(int(at) for at in np.unravel_index(flat, shape)) if shape else ()


def elements(a: NDArray[Any], b: NDArray[Any]) -> Elements | None:
    """How two arrays differ; None where their shapes do, or they hold no numbers."""
    if a.shape != b.shape or a.dtype.kind not in "biufc" or b.dtype.kind not in "biufc":
        return None
    mask = differing(a, b)
    places = np.flatnonzero(mask)
    wide = np.complex128 if "c" in (a.dtype.kind, b.dtype.kind) else np.float64
    one, two = (np.ascontiguousarray(side).reshape(-1)[places].astype(wide) for side in (a, b))
    with np.errstate(all="ignore"):
        distance = np.abs(one - two)
    finite = np.flatnonzero(np.isfinite(distance))
    best = int(finite[np.argmax(distance[finite])]) if len(finite) else None
    return Elements(
        total=int(mask.size),
        differing=len(places),
        largest=float(distance[best]) if best is not None else None,
        where=index_of(int(places[best]), a.shape) if best is not None else (),
        first=index_of(int(places[0]), a.shape) if len(places) else (),
        rows=tuple(
            (index_of(int(places[at]), a.shape), one[at].item(), two[at].item())
            for at in range(min(len(places), _KEPT))
        ),
    )


def ulp_bins(a: NDArray[Any], b: NDArray[Any], dtypes: tuple[str, str]) -> tuple[tuple[tuple[int, int], ...], str]:
    """Differing finite elements by their distance in representable numbers: 1, 2, 3 to 4, 5 to 8, ... .

    Returns:
        The lowest number of each bin that has any, with its count, and the dtype that is counted in: the coarser one.
        Elements that are equal in that dtype are not counted.
    """
    if dtypes[0] not in MANTISSA or dtypes[1] not in MANTISSA:
        return (), ""
    unit = min(dtypes, key=MANTISSA.__getitem__)
    finite = np.isfinite(a) & np.isfinite(b)
    steps = np.abs(_ordered(a[finite], unit) - _ordered(b[finite], unit))
    steps = steps[steps > 0]
    bins = np.minimum(np.ceil(np.log2(np.maximum(steps, 1))), _LARGE_BIN).astype(np.int64)
    counts = np.bincount(bins, minlength=1)
    lowest = [1, *(2**power + 1 for power in range(_LARGE_BIN))]
    return tuple((lowest[place], int(counts[place])) for place in np.flatnonzero(counts).tolist()), unit


def ulp_words(lowest: int) -> str:
    """A bin in words: `1`, `3 to 4`, `over 8,388,608`."""
    if lowest <= 2:
        return str(lowest)
    highest = 2 * (lowest - 1)
    return f"over {lowest - 1:,}" if highest == 2**_LARGE_BIN else f"{lowest:,} to {highest:,}"


def _ordered(values: NDArray[Any], dtype: str) -> NDArray[Any]:
    """The numbers as integers of which neighbours differ by one; float64's as long double, which holds them all."""
    bits: Any
    top: int
    if dtype == "bfloat16":
        bits = rounded(values, dtype).view(np.uint32) >> np.uint32(16)
        top = 15
    else:
        wide = {"float64": np.uint64, "float32": np.uint32, "float16": np.uint16}[dtype]
        with np.errstate(over="ignore"):
            bits = np.ascontiguousarray(values.astype(np.dtype(dtype))).view(np.dtype(wide))
        top = 8 * np.dtype(wide).itemsize - 1
    rest = (bits & bits.dtype.type((1 << top) - 1)).astype(np.int64)
    ordered: NDArray[Any] = np.where(bits >> bits.dtype.type(top) != 0, -rest, rest)
    return ordered.astype(np.longdouble) if dtype == "float64" else ordered


def rounded(values: NDArray[Any], dtype: str) -> NDArray[np.float32]:
    """Numbers rounded to float16 or bfloat16, as float32; to nearest, ties to even."""
    with np.errstate(over="ignore"):
        single = np.ascontiguousarray(values.astype(np.float32))
        if dtype == "float16":
            return single.astype(np.float16).astype(np.float32)
    bits: Any = single.view(np.uint32).astype(np.uint64)
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
    return np.where(np.isfinite(single), bits.astype(np.uint32).view(np.float32), single).astype(np.float32)


# --- how one follows from the other


def relation(a: NDArray[Any], b: NDArray[Any], mask: Mask, unit: str = "") -> tuple[str, ...]:
    """How b follows from a, as clauses, each true of every element that differs (`mask`), or of the whole tensors.

    The unit is torch's name of the dtype that both are rounded to; "" where there is none.
    """
    one, two = a[mask], b[mask]
    if a.dtype.kind not in "biuf" or b.dtype.kind not in "biuf":
        return ()
    one, two = one.astype(np.float64), two.astype(np.float64)
    infinite = _not_finite(one, two)
    if infinite:
        return (infinite,)
    clauses = (
        _constant(one, two),
        _proportion(one, two, a.dtype),
        _precision(a, b),
        _clamp(a, b, mask),
        _order(a, b),
    )
    return tuple(filter(None, clauses)) or _rounding(a, b, one, two, unit)


def _not_finite(one: NDArray[np.float64], two: NDArray[np.float64]) -> str:
    clauses = []
    for name, side, other in (("a", one, two), ("b", two, one)):
        for word, test in (("NaN", np.isnan), ("infinite", np.isinf)):
            number = int((test(side) & ~test(other)).sum())
            if number:
                some = "in all of them" if number == len(side) else f"in {number:,} of them"
                clauses.append(f"{name} is {word} {'there' if len(side) == 1 else some}")
    return "; ".join(clauses)


def _constant(one: NDArray[np.float64], two: NDArray[np.float64]) -> str:
    if (one == two).all():
        return "only the signs of zeros differ"
    clauses = []
    for name, side, other in (("a", one, two), ("b", two, one)):
        if len(side) > 1 and (side == side[0]).all() and not (other == other[0]).all():
            clauses.append(f"{name} is {side[0] + 0.0:.6g} in all of them")
    return "; ".join(clauses)


def _proportion(one: NDArray[np.float64], two: NDArray[np.float64], dtype: np.dtype[Any]) -> str:
    """One factor or one summand that makes b of a, to a few roundings of the dtype."""
    if len(one) < 4 or len(np.unique(one)) < 3:
        return ""
    tiny = float(np.finfo(dtype).eps) if dtype.kind == "f" else 2.0**-52
    if (two == -one).all():
        return "b is -a"
    nonzero = np.abs(one) > 0
    if nonzero.all():
        factor = float(np.median(two / one))
        if factor and abs(factor - 1) > 64 * tiny and (np.abs(two - factor * one) <= 4 * tiny * np.abs(two)).all():
            return f"b is {factor:.7g} times a"
    summand = float(np.median(two - one))
    slack = 2 * tiny * (np.abs(one) + np.abs(two))
    if abs(summand) > 64 * float(slack.max()) and (np.abs(two - one - summand) <= slack).all():
        return f"b is a {'+' if summand > 0 else '-'} {abs(summand):.7g}"
    return ""


def _precision(a: NDArray[Any], b: NDArray[Any]) -> str:
    """Whether one is the other rounded to a narrower type."""
    for name in ("bfloat16", "float16") if a.dtype == b.dtype == np.float32 else ():
        if not differing(rounded(a, name), b).any():
            return f"b is a rounded to {name}"
        if not differing(rounded(b, name), a).any():
            return f"a is b rounded to {name}"
    return ""


def _clamp(a: NDArray[Any], b: NDArray[Any], mask: Mask) -> str:
    for names, wide, narrow in (("b is a", a, b), ("a is b", b, a)):
        low, high = narrow.min(), narrow.max()
        ends = np.unique(narrow[mask])
        at_ends = low < high and len(ends) <= 2 and np.isin(ends, [low, high]).all() and mask.sum() > 1
        if at_ends and np.array_equal(np.clip(wide, low, high), narrow):
            return f"{names} clamped to {float(low):.6g} to {float(high):.6g}"
    return ""


def _rounding(
    a: NDArray[Any], b: NDArray[Any], one: NDArray[np.float64], two: NDArray[np.float64], unit: str
) -> tuple[str, ...]:
    """Whether the differences are of the size of rounding, by the largest element of both."""
    if unit not in MANTISSA:
        return ()
    size = max(float(np.abs(side[np.isfinite(side)]).max(initial=0.0)) for side in (a, b))
    step = float(np.ldexp(1.0, int(np.frexp(size)[1]) - 1 - MANTISSA[unit]))
    ulps = float(np.abs(one - two).max()) / step if step else np.inf
    if ulps > _ROUNDINGS:
        return ()
    return (f"no difference is larger than {ulps:.2g} ULPs of the largest element, as where only rounding differs",)


def _order(a: NDArray[Any], b: NDArray[Any]) -> str:
    """Whether b holds the values of a at other places."""
    if a.size < 4 or a.dtype != b.dtype or not np.array_equal(np.sort(a, axis=None), np.sort(b, axis=None)):
        return ""
    if len(np.unique(a)) < 3:
        return ""
    if a.ndim == 2 and a.shape[0] == a.shape[1] and np.array_equal(a.T, b):
        return "b is a transposed"
    for dim in range(a.ndim):
        size = a.shape[dim]
        if size < 2:
            continue
        if np.array_equal(np.flip(a, dim), b):
            return f"b is a with dimension {dim} reversed"
        for shift in {1, size - 1, size // 2}:
            if np.array_equal(np.roll(a, shift, dim), b):
                way = shift if shift <= size // 2 else shift - size
                return f"b is a moved by {way} along dimension {dim}"
        if _same_slices(a, b, dim):
            return f"b holds the slices of a along dimension {dim} in another order"
    return "b holds the values of a in another order"


def _same_slices(a: NDArray[Any], b: NDArray[Any], dim: int) -> bool:
    one, two = (np.moveaxis(side, dim, 0).reshape(side.shape[dim], -1) for side in (a, b))
    held = ([row.tobytes() for row in np.ascontiguousarray(side)] for side in (one, two))
    first, second = (sorted(rows) for rows in held)
    return first == second and len(set(first)) > 1
