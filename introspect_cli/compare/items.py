"""One divergence as an object, out of the arrays of its step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from introspect_cli.compare.element.elements import Elements, elements
from introspect_cli.compare.join.distance import distance_of, distances, relative
from introspect_cli.compare.result import RESOLUTION, Divergence
from introspect_cli.compare.size import size_of, terms_of
from introspect_cli.records import Kind, Status, Summary

if TYPE_CHECKING:
    from introspect_cli.compare.evidence import Cause
    from introspect_cli.compare.step import Step

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


def materialise(step: Step, position: int, cause: Cause) -> Divergence:
    """The divergence at a position of a step."""
    comparison, table, divergences = step.comparison, step.table, step.divergences
    sides, (layouts_a, layouts_b) = comparison.sides, comparison.layouts
    row_a, row_b = int(divergences.row_a[position]), int(divergences.row_b[position])
    number = int(divergences.site[position])
    site = step.sites[position]
    record_a = sides.a.record(table.a, row_a, table.step) if row_a >= 0 else None
    record_b = sides.b.record(table.b, row_b, table.step_b) if row_b >= 0 else None
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
        elif table.a.sketch is not None and table.b.sketch is not None:
            one_a, one_b = np.array([row_a]), np.array([row_b])
            found = relative(*distances(table.a, table.b, one_a, one_b, layouts_a, layouts_b))[0]
            rel = float(found) if np.isfinite(found) else None
            if rel == 0 and _not_finite(a):
                rel = None  # sketches leave infinities out, and where these are differs
            if a.layout.shape == b.layout.shape and a.layout.numel > 16 and not _not_finite(a):
                fit = proportion(table.a.sketch[row_a], table.b.sketch[row_b])
            if fit is not None:
                rel = abs(fit[0] - 1) / max(1.0, abs(fit[0]))  # what follows from the factor is no estimate
        same_shape = a.layout.shape == b.layout.shape
        stored = sides.tensors.both(a.checksum, b.checksum, a.layout.shape) if same_shape else None
        if stored is not None:
            rel, exact, apart = distance_of(*stored), True, elements(*stored)
    scale = None if fit is None else fit[0]
    return Divergence(
        step=table.step,
        step_b=table.step_b,
        rank=sides.rank,
        sequence=step.order_at(position),
        site=site,
        module_class=step.alignment.module_class[number],
        role=cause.role,
        reason=cause.reason,
        a=a,
        b=b,
        rel_l2=rel,
        exact=exact and rel is not None,
        size=None if site.kind is Kind.RNG else size_of(a, b, rel, terms_of(step, site, a), scale),
        scale=scale,
        residual=None if fit is None else fit[1],
        floor=max((float(own.floor[number]) for own in comparison.floors if number < len(own.floor)), default=None),
        coarse=layouts_a.coarse or layouts_b.coarse,
        source=info.source if info is not None and site.kind is Kind.OP_OUTPUT else "",
        elements=apart,
        labels=sides.a.labels.get(table.step, {}),
        labels_b=sides.b.labels.get(table.step_b, {}),
    )
