"""How the values of one tensor follow from those of another: a factor, a summand, a narrower type, another order.

Each relation is told only where it holds of every element that differs, or of the whole tensors; a factor and a summand
to a few roundings of the dtype. Where none holds, it may be that nothing but rounding differs: another order of a sum
moves its result by a few units in the last place, and by more where large terms cancel. So the differences are held
against the largest element.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from introspect_cli.compare.element.elements import MANTISSA, differing, rounded

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Mask = NDArray[np.bool_]

_ROUNDINGS = 16
"""Units in the last place of the largest element up to which differences are of the size of rounding."""


def relation(a: NDArray[Any], b: NDArray[Any], mask: Mask, unit: str = "") -> tuple[str, ...]:
    """How b follows from a, as clauses, each true of every element that differs, or of the whole tensors.

    Args:
        a: the one, of which something differs.
        b: the other, of the same shape.
        mask: where they differ.
        unit: torch's name of the dtype that both are rounded to; "" where there is none.
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
    known = np.abs(one) > 0
    if known.all():
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
