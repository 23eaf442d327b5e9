"""A divergence as an object, and its size as a class: rounding of its dtype, more than rounding, or structural.

Rounding means: as far apart as another order of the same sums makes two correctly computed values. Of a sum of n
products that is, with a probability near 1, at most a small multiple of sqrt(n) u relative to the values that go in,
where u is the dtype's unit roundoff (Higham and Mary, A New Approach to Probabilistic Rounding Error Analysis, SIAM J.
Sci. Comput. 41(5), 2019; the certain bound is n u: Higham, Accuracy and Stability of Numerical Algorithms, 4.2). So two
values are a rounding apart where

    relative L2 <= 4 sqrt(max(n, 256)) u, and <= 0.05,

and minimum, maximum and mean agree to that as well: an L2 distance does not see small values beside huge ones. The 256
leave 64 u to what is no sum, for an exponential or a quotient of such is not rounded once either. n is the number of
terms of the reduction as far as the records tell: of a parameter's gradient the elements of its module's output
gradient for each of its own rows (samples, tokens), of a module's output its parameters' elements for each row (the
fan-in), else 256. Where terms cancel, a sum may be further off and still be rounding; that is called more than
rounding, and `capture --perturb` measures it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from introspect_cli.compare.elements import Elements, elements
from introspect_cli.compare.terms.distance import ROUNDING, distance_of, distances, relative, shapes_differ
from introspect_cli.compare.terms.names import owner_of
from introspect_cli.compare.terms.result import RESOLUTION, Divergence, Size
from introspect_cli.records import Kind, Phase, Site, Status, Summary
from introspect_cli.store.format.batch import scale_between

if TYPE_CHECKING:
    from collections.abc import Mapping

    from introspect_cli.compare.step.step import Step
    from introspect_cli.compare.terms.evidence import Cause


_MIN_TERMS = 256
_SAFETY_FACTOR = 4.0
_MAX_BOUND = 0.05
"""No more than that: half precision adds up in float32, and rounds a sum a few times."""

LEAST_BOUND = _SAFETY_FACTOR * _MIN_TERMS**0.5
"""Roundings that two values may be apart whatever they are made of."""

_PASSES = frozenset({Phase.BACKWARD, Phase.FORWARD, Phase.EVAL, Phase.START})


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
    if unit is None:
        return Size.MORE  # of integers and the like, nothing is rounded
    if rel is None:
        return Size.MORE if has_nonfinite(a.stats) or has_nonfinite(b.stats) else None
    bound = min(_SAFETY_FACTOR * max(terms, _MIN_TERMS) ** 0.5 * unit, _MAX_BOUND)
    if rel > bound or (scale is not None and rel > LEAST_BOUND * unit):
        return Size.MORE
    if not (a.stats and b.stats):
        return None
    return Size.ROUNDING if _statistics_agree(a.stats, b.stats, bound) else Size.MORE


def terms_of(step: Step, site: Site, a: Summary | None) -> int:
    """Number of terms of the sum that gives run a's value at `site`; 0 where unknown.

    Of a gradient: elements of its module's output gradient (else output) per row of the parameter. Of an output or
    input gradient: the largest fan-in of its module's parameters. 0 for all other kinds and for single numbers.

    Args:
        step: the step of the record.
        site: what was recorded.
        a: run a's record of it; None gives 0.
    """
    if a is None or not a.layout.shape:
        return 0
    if site.kind is Kind.GRAD:
        owner = owner_of(site.fqn)
        given = _largest_numel(step, Kind.GRAD_OUTPUT, owner) or _largest_numel(step, Kind.OUTPUT, owner)
        return given // max(a.layout.shape[0], 1)
    if site.kind in {Kind.OUTPUT, Kind.GRAD_INPUT}:
        held = step.comparison.tensors_in(site.fqn)
        return max((_fan_in(step, name) for name in held), default=0)
    return 0


def _largest_numel(step: Step, kind: Kind, fqn: str) -> int:
    """Number of elements of the largest value of a kind that run a recorded of a module in the step; 0 for none."""
    rows = [
        row for union in step.of(kind, _PASSES, fqn) if (row := step.table.rows_of("a").get(int(union))) is not None
    ]
    return int(step.comparison.layouts[0].numel[step.table.a.layout[rows]].max(initial=0))


def _fan_in(step: Step, name: str) -> int:
    """Product of a parameter's dimensions but the first, by run a's record of it or of its gradient in the step.

    0 for fewer than two dimensions, or without a record.
    """
    for kind in (Kind.PARAM, Kind.GRAD):
        for union in step.of(kind, frozenset(Phase), name):
            row = step.table.rows_of("a").get(int(union))
            if row is not None:
                shape = step.comparison.a.layouts[int(step.table.a.layout[row])].shape
                return int(np.prod(shape[1:])) if len(shape) > 1 else 0
    return 0


def _statistics_agree(a: Mapping[str, float], b: Mapping[str, float], tolerance: float) -> bool:
    """Whether minimum, maximum and mean are on record and as close as `tolerance`, and neither tensor has NaN or inf.

    Minima and maxima are compared relative to the larger absolute value of the two, means relative to the larger mean
    absolute value.
    """
    if has_nonfinite(a) or has_nonfinite(b):
        return False
    spread = max(abs(a.get("amean", 0.0)), abs(b.get("amean", 0.0)))
    for name in ("min", "max", "mean"):
        one, two = a.get(name), b.get(name)
        if one is None or two is None:
            return False
        if abs(one - two) > tolerance * (spread if name == "mean" else max(abs(one), abs(two))):
            return False
    return True


_UNMEASURED = frozenset({Kind.RNG})


def proportion(sketch_a: npt.NDArray[Any], sketch_b: npt.NDArray[Any]) -> tuple[float, float] | None:
    """(c, residual) where b is c times a by least squares over two sketches; the residual is relative to b's norm.

    None where the residual is not below 20 `RESOLUTION`, or c is within 50 `RESOLUTION` of 1.
    """
    factor, rest = scale_between(sketch_a, sketch_b)
    return (factor, rest) if rest < 20 * RESOLUTION and abs(factor - 1) > 50 * RESOLUTION else None


def _plain_relative(a: Summary, b: Summary) -> float | None:
    """Absolute difference of the numbers in the texts of two records over the larger absolute value, 0 for two zeros.

    None if either is not finite or no number.
    """
    try:
        x, y = float(a.text), float(b.text)
    except ValueError:
        return None
    scale = max(abs(x), abs(y))
    distance = abs(x - y)
    if not np.isfinite(distance):
        return None
    return 0.0 if scale == 0 else distance / scale


def has_nonfinite(stats: Mapping[str, float]) -> bool:
    """Whether these statistics of a tensor count any NaN or infinity; False where they have no counts."""
    return any(stats.get(name, 0) for name in ("nans", "posinfs", "neginfs"))


def divergence_at(step: Step, position: int, cause: Cause) -> Divergence:
    """The divergence at a position of `step.divergences`, with role and reason of `cause`, distance, size and factor.

    Reads the whole tensors from disk, where both runs stored them; then the distance is exact. Else it is that of the
    texts, or by sketches, and where b is c times a, what follows from c. Random states and one-sided records have no
    distance, random states no size either. `floor` is the largest of all noise runs, None without any.
    """
    comparison, table, divergences = step.comparison, step.table, step.divergences
    layouts_a, layouts_b = comparison.layouts
    row_a, row_b = int(divergences.row_a[position]), int(divergences.row_b[position])
    number = int(divergences.site[position])
    site = step.sites[position]
    records = (
        comparison.a.record(table.a, row_a, table.step) if row_a >= 0 else None,
        comparison.b.record(table.b, row_b, table.step_b) if row_b >= 0 else None,
    )
    a, b = (None if record is None else record.summary for record in records)
    info = next((record.info for record in records if record is not None), None)
    same_shape = a is not None and b is not None and a.layout.shape == b.layout.shape
    rel: float | None = None
    fit: tuple[float, float] | None = None
    exact = False
    differing: Elements | None = None
    if a is not None and b is not None and site.kind not in _UNMEASURED:
        if Status.VALUE in (a.status, b.status):
            rel, exact = _plain_relative(a, b), True
        elif table.a.sketch is not None and table.b.sketch is not None:
            one_a, one_b = np.array([row_a]), np.array([row_b])
            relative_l2 = relative(*distances(table.a, table.b, one_a, one_b, layouts_a, layouts_b))[0]
            rel = float(relative_l2) if np.isfinite(relative_l2) else None
            finite = bool(a.stats) and not has_nonfinite(a.stats)
            if rel == 0 and not finite:
                rel = None  # sketches leave infinities out, and where these are differs
            if same_shape and a.layout.numel > 16 and finite:
                fit = proportion(table.a.sketch[row_a], table.b.sketch[row_b])
            if fit is not None:
                rel = abs(fit[0] - 1) / max(1.0, abs(fit[0]))  # what follows from the factor is no estimate
        stored = comparison.tensors.both(a.checksum, b.checksum, a.layout.shape) if same_shape else None
        if stored is not None:
            rel, exact, differing = distance_of(*stored), True, elements(*stored)
    scale, residual = fit or (None, None)
    return Divergence(
        step=table.step,
        step_b=table.step_b,
        rank=comparison.rank,
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
        residual=residual,
        floor=max(
            (float(noise.floor[number]) for noise in comparison.floors if number < len(noise.floor)), default=None
        ),
        coarse=layouts_a.coarse or layouts_b.coarse,
        source=info.source if info is not None and site.kind in {Kind.OP_OUTPUT, Kind.COLLECTIVE} else "",
        elements=differing,
        labels=comparison.a.labels.get(table.step, {}),
        labels_b=comparison.b.labels.get(table.step_b, {}),
    )
