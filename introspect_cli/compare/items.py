"""One divergence as an object, out of the arrays of its step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from introspect_cli.compare.elements import Elements, elements
from introspect_cli.compare.join.distance import Layouts, distance_of, distances, relative
from introspect_cli.compare.result import RESOLUTION, Divergence
from introspect_cli.records import Kind, Status, Summary

if TYPE_CHECKING:
    from collections.abc import Sequence

    from introspect_cli.compare.join.steps import Sides
    from introspect_cli.compare.reasons.base import Cause
    from introspect_cli.compare.reasons.facts import Facts

_UNMEASURED = frozenset({Kind.RNG})


def proportion(sketch_a: npt.NDArray[Any], sketch_b: npt.NDArray[Any]) -> tuple[float, float] | None:
    """C where b is c times a, by least squares over the sketches, and what is left over b; None where no factor fits.

    A sketch is linear, so that sketch(c * a) = c * sketch(a); 16 numbers that fit one factor to a few roundings are no
    accident, except for tensors of a single element, which the caller leaves out.
    """
    a, b = sketch_a.astype(np.float64), sketch_b.astype(np.float64)
    size_a, size_b = float(a @ a), float(b @ b)
    if not (np.isfinite(size_a) and np.isfinite(size_b)) or size_a == 0 or size_b == 0:
        return None
    factor = float(a @ b) / size_a
    rest = float(np.linalg.norm(b - factor * a)) / size_b**0.5
    return (factor, rest) if rest < 20 * RESOLUTION and abs(factor - 1) > 50 * RESOLUTION else None


def _plain_relative(a: Summary, b: Summary) -> float | None:
    """Relative distance of two plain numbers."""
    try:
        x, y = float(a.text), float(b.text)
    except ValueError:
        return None
    scale = max(abs(x), abs(y))
    apart = abs(x - y)
    if not np.isfinite(apart):
        return None
    return 0.0 if scale == 0 else apart / scale


def _not_finite(summary: Summary) -> bool:
    """Whether a tensor holds NaNs or infinities, or may do."""
    return not summary.stats or any(summary.stats.get(name, 0) for name in ("nans", "posinfs", "neginfs"))


def materialise(
    ranks: Sides,
    facts: Facts,
    position: int,
    cause: Cause,
    layouts_a: Layouts,
    layouts_b: Layouts,
    floors: Sequence[npt.NDArray[np.float64]],
) -> Divergence:
    """The divergence at a position of a step's items."""
    items, pair = facts.items, facts.pair
    row_a, row_b = int(items.row_a[position]), int(items.row_b[position])
    union = int(items.union[position])
    site = facts.sites[position]
    record_a = ranks.a.record(pair.a, row_a, pair.step) if row_a >= 0 else None
    record_b = ranks.b.record(pair.b, row_b, pair.step_b) if row_b >= 0 else None
    a = None if record_a is None else record_a.summary
    b = None if record_b is None else record_b.summary
    info = next((record.info for record in (record_a, record_b) if record is not None), None)
    rel: float | None = None
    fit: tuple[float, float] | None = None
    exact = False
    apart: Elements | None = None
    if a is not None and b is not None and site.kind not in _UNMEASURED:
        if Status.VALUE in (a.status, b.status):
            rel, exact = _plain_relative(a, b), True
        elif pair.a.sketch is not None and pair.b.sketch is not None:
            one_a, one_b = np.array([row_a]), np.array([row_b])
            found = relative(*distances(pair.a, pair.b, one_a, one_b, layouts_a, layouts_b))[0]
            rel = float(found) if np.isfinite(found) else None
            if rel == 0 and _not_finite(a):
                rel = None  # sketches leave infinities out, and where these are differs
            if a.layout.shape == b.layout.shape and a.layout.numel > 16 and not _not_finite(a):
                fit = proportion(pair.a.sketch[row_a], pair.b.sketch[row_b])
            if fit is not None:
                rel = abs(fit[0] - 1) / max(1.0, abs(fit[0]))  # what follows from the factor is no estimate
        same_shape = a.layout.shape == b.layout.shape
        stored = ranks.tensors.both(a.checksum, b.checksum, a.layout.shape) if same_shape else None
        if stored is not None:
            rel, exact, apart = distance_of(*stored), True, elements(*stored)
    return Divergence(
        step=pair.step,
        step_b=pair.step_b,
        rank=ranks.rank,
        sequence=float(items.order[position]),
        site=site,
        module_class=facts.alignment.module_class[union],
        role=cause.role,
        reason=cause.reason,
        a=a,
        b=b,
        rel_l2=rel,
        exact=exact and rel is not None,
        scale=None if fit is None else fit[0],
        residual=None if fit is None else fit[1],
        floor=max((float(floor[union]) for floor in floors if union < len(floor)), default=None),
        coarse=layouts_a.coarse or layouts_b.coarse,
        source=info.source if info is not None and site.kind is Kind.OP_OUTPUT else "",
        elements=apart,
        labels=ranks.a.labels.get(pair.step, {}),
        labels_b=ranks.b.labels.get(pair.step_b, {}),
    )
