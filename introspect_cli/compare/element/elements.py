"""Two whole tensors, element by element: how many differ, by how much, and where.

Equal means the same bits, as everywhere: -0.0 differs from 0.0; a NaN equals a NaN here, since numpy has no payloads
to show. How far two floating point numbers are apart is counted in numbers that could stand between them: a unit in the
last place (ULP) is one representable number to the next. Rounding moves results by a few of them, whatever their size;
a fault moves them by thousands.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

_KEPT = 64

MANTISSA = {"float64": 52, "float32": 23, "float16": 10, "bfloat16": 7}
"""Bits after the point that a number of a dtype has."""

_LARGE_BIN = 24


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


def differing(a: NDArray[Any], b: NDArray[Any]) -> NDArray[np.bool_]:
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
    return tuple((_lowest(place), int(counts[place])) for place in np.flatnonzero(counts).tolist()), unit


def _lowest(place: int) -> int:
    return 1 if place == 0 else 2 ** (place - 1) + 1


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
