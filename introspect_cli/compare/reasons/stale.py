"""A gradient in which that of the step before is left over, since zero_grad is missing or late."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from introspect_cli.records import Kind

if TYPE_CHECKING:
    from introspect_cli.compare.step.step import Step


def stale_side(step: Step, position: int) -> str:
    """The side whose gradient is the other's plus that of the step before, by the sketches' linearity."""
    return stale_share(step, position)[0]


def stale_share(step: Step, position: int) -> tuple[str, float]:
    """That side, and how many times the gradient of the step before counts beside the other's."""
    site, union = step.sites[position], int(step.divergences.site[position])
    table = step.table
    if site.call:  # an optimizer that evaluates the model several times a step
        earlier = step.of_call(site.phase, Kind.GRAD, site.fqn, site.call - 1)
        old = table.sketch(earlier[0], "a") if earlier else None
    else:
        old = None if step.before is None else step.before.sketch(union, "a")
    sketches = table.sketches(union)
    if sketches is None or old is None or not old.any():
        return "", 0.0
    a, b = sketches
    shares = (("b", _mix(b, a, old)), ("a", _mix(a, b, old)))
    return next((each for each in shares if each[1]), ("", 0.0))


def _mix(mixed: Any, fresh: Any, old: Any) -> float:
    """How much of `old` a sketch has beside `fresh`, if it is a positive mix of both, which clipping may rescale; or 0.

    An old gradient that was unscaled already is next to nothing beside one that was not: what is left over has to be
    small beside its share, too.
    """
    basis = np.stack([fresh, old], axis=1)
    if not (np.isfinite(basis).all() and np.isfinite(mixed).all()):
        return 0.0
    if np.linalg.matrix_rank(basis, tol=1e-6 * float(np.linalg.norm(basis))) < 2:
        return 0.0
    weights = np.linalg.lstsq(basis, mixed, rcond=None)[0]
    rest, share = float(np.linalg.norm(basis @ weights - mixed)), float(np.linalg.norm(weights[1] * old))
    is_mix = min(weights) > 0 and rest < min(1e-5 * float(np.linalg.norm(mixed)), 2e-2 * share)
    return float(weights[1] / weights[0]) if is_mix else 0.0
