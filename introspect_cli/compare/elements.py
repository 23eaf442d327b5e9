"""Two whole tensors, element by element: how many differ, by how much, and where.

Equal means the same bits, as everywhere: -0.0 differs from 0.0; a NaN equals a NaN here, since numpy has no payloads
to show.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

_KEPT = 64


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
    found = np.asarray(a != b)
    if a.dtype.kind in "fc":
        found &= ~(np.isnan(a) & np.isnan(b))
        if a.dtype.kind == "f":
            found |= (a == b) & (np.signbit(a) != np.signbit(b))
    return found


def elements(a: NDArray[Any], b: NDArray[Any]) -> Elements | None:
    """How two arrays differ; None where their shapes do, or they hold no numbers."""
    if a.shape != b.shape or a.dtype.kind not in "biufc" or b.dtype.kind not in "biufc":
        return None
    mask = differing(a, b)
    places = np.flatnonzero(mask)
    wide = np.complex128 if "c" in (a.dtype.kind, b.dtype.kind) else np.float64
    one, two = (np.ascontiguousarray(own).reshape(-1)[places].astype(wide) for own in (a, b))
    with np.errstate(all="ignore"):
        apart = np.abs(one - two)
    finite = np.flatnonzero(np.isfinite(apart))

    def index(flat: int) -> tuple[int, ...]:
        return tuple(int(own) for own in np.unravel_index(flat, a.shape)) if a.shape else ()

    best = int(finite[np.argmax(apart[finite])]) if len(finite) else None
    return Elements(
        total=int(mask.size),
        differing=len(places),
        largest=float(apart[best]) if best is not None else None,
        where=index(int(places[best])) if best is not None else (),
        first=index(int(places[0])) if len(places) else (),
        rows=tuple((index(int(places[at])), one[at].item(), two[at].item()) for at in range(min(len(places), _KEPT))),
    )
