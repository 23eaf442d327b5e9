"""The size of a divergence as a class: rounding of its dtype, more than rounding, or structural.

Rounding means: as far apart as another order of the same sums makes two correctly computed values. Of a sum of n
products that is, with a probability near 1, at most a small multiple of sqrt(n) u relative to the values that go in,
where u is the dtype's unit roundoff (Higham and Mary, A New Approach to Probabilistic Rounding Error Analysis, SIAM J.
Sci. Comput. 41(5), 2019; the certain bound is n u: Higham, Accuracy and Stability of Numerical Algorithms, 4.2). So two
values are a rounding apart where

    relative L2 <= 4 sqrt(max(n, 256)) u,

and minimum, maximum and mean agree to that as well: an L2 distance does not see small values beside huge ones. The 256
leave 64 u to what is no sum, for an exponential or a quotient of such is not rounded once either. n is the number of
terms of the reduction as far as the records tell: of a parameter's gradient the elements of its module's output
gradient for each of its own rows (samples, tokens), of a module's output its parameters' elements for each row (the
fan-in), else 256. Where terms cancel, a sum may be further off and still be rounding; that is called more than
rounding, and `capture --perturb` measures it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from introspect_cli.compare.join.distance import ROUNDING, shapes_differ
from introspect_cli.compare.names import owner_of
from introspect_cli.compare.result import Size
from introspect_cli.records import Kind, Phase, Site, Status, Summary

if TYPE_CHECKING:
    from collections.abc import Mapping

    from introspect_cli.compare.step import Step

_FEWEST = 256
_MULTIPLE = 4.0
LEAST_BOUND = _MULTIPLE * _FEWEST**0.5
"""Roundings that two values may be apart whatever they are made of."""

_PASSES = frozenset({Phase.BACKWARD, Phase.FORWARD, Phase.EVAL, Phase.START})


def size_of(
    a: Summary | None, b: Summary | None, rel: float | None, terms: int = 0, scale: float | None = None
) -> Size | None:
    """The class of a divergence; None where what was recorded does not tell.

    Args:
        a: what run a recorded.
        b: what run b recorded.
        rel: relative L2 distance; None where it is not known.
        terms: of the reduction that gives it; 0 where that is not known.
        scale: c where b is c times a: no order of sums makes one factor for all elements.
    """
    if a is None or b is None or a.status is not b.status or shapes_differ(a, b):
        return Size.STRUCTURAL
    if a.layout.dtype != b.layout.dtype or (a.status is Status.VALUE and rel is None):
        return Size.STRUCTURAL
    unit = ROUNDING.get(a.layout.dtype)
    if unit is None:
        return Size.MORE  # of integers and the like, nothing is rounded
    if rel is None:
        nonfinite = (sum(own.stats.get(name, 0) for name in ("nans", "posinfs", "neginfs")) for own in (a, b))
        return Size.MORE if any(nonfinite) else None
    bound = _MULTIPLE * max(terms, _FEWEST) ** 0.5 * unit
    if rel > bound or (scale is not None and rel > LEAST_BOUND * unit):
        return Size.MORE
    if not (a.stats and b.stats):
        return None
    return Size.ROUNDING if _alike(a.stats, b.stats, bound) else Size.MORE


def terms_of(step: Step, site: Site, a: Summary | None) -> int:
    """How many terms the reduction has that gives a value, as far as the step's records tell; 0 where they do not."""
    if a is None or not a.layout.shape:
        return 0
    if site.kind is Kind.GRAD:
        given = _elements(step, Kind.GRAD_OUTPUT, owner_of(site.fqn)) or _elements(
            step, Kind.OUTPUT, owner_of(site.fqn)
        )
        return given // max(a.layout.shape[0], 1)
    if site.kind in {Kind.OUTPUT, Kind.GRAD_INPUT}:
        held = step.comparison.tensors_in(site.fqn)
        return max((_fan_in(step, name) for name in held), default=0)
    return 0


def _elements(step: Step, kind: Kind, fqn: str) -> int:
    """Elements of the largest value of a kind that a module has in run a in the step."""
    return max((_numel(step, int(union)) for union in step.of(kind, _PASSES, fqn)), default=0)


def _numel(step: Step, union: int) -> int:
    row = step.table.rows_of("a").get(union)
    return 0 if row is None else int(step.comparison.layouts[0].numel[int(np.asarray(step.table.a.layout)[row])])


def _fan_in(step: Step, name: str) -> int:
    """Elements of a parameter for each of its rows."""
    for kind in (Kind.PARAM, Kind.GRAD):
        for union in step.of(kind, frozenset(Phase), name):
            row = step.table.rows_of("a").get(int(union))
            if row is not None:
                shape = step.sides.a.layouts[int(np.asarray(step.table.a.layout)[row])].shape
                return int(np.prod(shape[1:])) if len(shape) > 1 else 0
    return 0


def _alike(a: Mapping[str, float], b: Mapping[str, float], tolerance: float) -> bool:
    """Whether extrema and mean agree to within rounding too; a sketch does not see small values beside huge ones."""
    if any(stats.get(name, 0) for stats in (a, b) for name in ("nans", "posinfs", "neginfs")):
        return False
    spread = max(abs(a.get("amean", 0.0)), abs(b.get("amean", 0.0)))
    for name in ("min", "max", "mean"):
        one, two = a.get(name), b.get(name)
        if one is None or two is None:
            return False
        if abs(one - two) > tolerance * (spread if name == "mean" else max(abs(one), abs(two))):
            return False
    return True
