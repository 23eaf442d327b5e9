"""Gradients: of what flows through modules, and of parameters as an optimizer step finds them.

Clipping by a norm, unscaling and averaging over accumulated batches multiply all gradients of an optimizer by one
factor. So where a gradient differs by no factor, or where another one that is not zero is equal, they were not what
changed. A missing zero_grad adds the gradient of the step before, which the sketches show. Several ranks or several
backward passes in a step are left out of this: what clips a part of a gradient before it is added up leaves no factor
in the sum.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import takewhile
from typing import TYPE_CHECKING, Any

import numpy as np

from introspect_cli.compare.evidence import Cause, Known, with_state
from introspect_cli.compare.reasons.base import cause, evidence_of, is_fed
from introspect_cli.compare.reasons.ranks import reduction_factor
from introspect_cli.compare.say import finds, found
from introspect_cli.compare.step import PASSES
from introspect_cli.compare.table import DIFFERENT, EQUAL, PHASES
from introspect_cli.derived import ROUNDING, scale_between
from introspect_cli.records import Kind, Phase

if TYPE_CHECKING:
    from collections.abc import Iterator

    from introspect_cli.compare.reasons.view import View
    from introspect_cli.compare.result import Finding
    from introspect_cli.compare.step import Step


_REST = 1e-5
"""What is left of a gradient beside the best multiple of the other, where that is no rounding of a factor."""


_TOGETHER = "factors"
"""What multiplies all gradients by one factor, where a step has one backward pass."""


def excluded_handling(at: View) -> frozenset[str]:
    """Codes of gradient handling that the records rule out as a cause.

    None is ruled out where a run has several ranks, where either run has not exactly one loss in the step, where the
    gradient is not of the first call (`site.call` > 0), or where it is sparse. Else all of `_TOGETHER` are ruled out
    where no factor maps a's gradient to b's; with `zero-grad`, where at most one optimizer steps and another gradient
    is equal and not zero.
    """
    several = max(run.world_size for run in at.runs) > 1 or at.losses != (1, 1)
    sparse = any(summary is not None and summary.layout.is_sparse for summary in (at.first.a, at.first.b))
    if several or at.site.call or sparse:
        return frozenset()
    if max(map(len, at.optimizers)) < 2 and _has_equal_gradient(at):
        return frozenset({_TOGETHER, "zero-grad"})
    return frozenset({_TOGETHER} if _has_no_factor(at) else ())


def _has_equal_gradient(at: View) -> bool:
    """Whether any gradient of the step in this site's phase is equal in both runs and not zero."""
    rows, means = at.table.rows_of["a"], at.table.a.floats.get("amean")
    equal = (u for u in map(int, at.step.of(Kind.GRAD, at.site.phase)) if at.step.state[u] == EQUAL)
    return means is not None and any(float(means[rows[union]]) > 0 for union in equal if union in rows)


def _has_no_factor(at: View) -> bool:
    """Whether b's gradient is no multiple of a's: the best multiple leaves over `_REST` of b's norm, by sketches.

    False where that cannot be told: a record or sketch is missing, a tensor has 16 elements or fewer, or a dtype is
    coarser than float32. False also where the divergence has a factor (`scale`).
    """
    first = at.first
    if first.a is None or first.b is None or first.scale is not None or first.a.layout.numel <= 16:
        return False
    if max(ROUNDING.get(summary.layout.dtype, 1.0) for summary in (first.a, first.b)) > ROUNDING["float32"]:
        return False
    sketches = at.table.sketches(at.union)
    return sketches is not None and scale_between(*sketches)[1] > _REST


# --- through modules


def backward_cause(step: Step, position: int) -> Cause | None:
    """Cause `backward`; None where anything differs before, but the gradients of that call just before it.

    The gradients of what one call was given, or gave, are computed beside one another.
    """
    site = step.sites[position]
    beside = takewhile(lambda at: replace(step.sites[at], path=site.path) == site, range(position, -1, -1))
    return None if is_fed(step, [*beside][-1]) else cause("backward", *evidence_of("backward", step, position))


@finds("backward")
def find_recomputation(at: View) -> Iterator[Finding]:
    """Finding where the module has, in either run, a record of phase `recompute` in the step.

    That is activation checkpointing.
    """
    phases, unions = at.step.alignment.phase, at.step.alignment.by_fqn.get(at.site.fqn, [])
    if any(at.step.state[union] and PHASES[phases[union]] is Phase.RECOMPUTE for union in unions):
        yield found("recomputed", module=at.site.fqn)


# --- of parameters


def gradient_cause(step: Step, position: int) -> Cause | None:
    """Cause `gradient` of a parameter's gradient at an optimizer step; None where something that goes into it differs.

    That is an earlier record of the forward or backward pass or of the start, a random state at the start, or a
    parameter as the step finds it. None also without an FQN. Where the values show a stale gradient, evidence that was
    not observed is not needed.
    """
    if is_fed(step, position, PASSES | {Phase.START}) or not step.sites[position].fqn:
        return None
    passes = evidence_of("gradient", step, position)
    if with_state(passes, Known.UNSEEN) and side_with_stale(step, position):
        passes = [fact._replace(needed=False) for fact in passes]  # the values alone tell the cause
    return cause("gradient", *passes)


@finds("plain", "gradient")
def find_stale_gradient(at: View) -> Iterator[Finding]:
    """Finding where one run's gradient is the other's plus a share of the previous one (a missing `zero_grad`)."""
    if side := side_with_stale(at.step, at.position):
        yield found("stale", side=side, of="evaluation" if at.site.call else "step")


@finds("gradient")
def find_whole_factor(at: View) -> Iterator[Finding]:
    """Finding where one gradient is the other times the number of ranks, or of those of a data-parallel group.

    That is a sum instead of a mean.
    """
    factor = reduction_factor(at)
    if factor and at.first.scale is not None:
        yield found("summed", times=f"{at.first.scale:.6g}", of=factor)


def left_in_gradient(at: View) -> Iterator[str]:
    """Codes of the remaining causes, in this order.

    `sent` with several ranks. Then kinds of handling: those of `_TOGETHER` where one factor fits and they are not
    ruled out; else all that are not. Then `use-in-module` where only some gradients differ and a module uses the
    parameter, and `penalty`. Where the distance is rounding, `_TOGETHER` is ruled out and a module uses the parameter,
    it is `rounding-in-backward` instead.
    """
    gone, states = excluded_handling(at), at.step.state[at.step.of(Kind.GRAD, at.site.phase)]
    if max(run.world_size for run in at.runs) > 1:
        yield "sent"
    if gone and at.rounding and at.parameter_user:
        yield "rounding-in-backward"
        return
    factor = at.first.scale is not None and not gone
    yield from (code for code in (_TOGETHER, *("zero-grad", "gradient-by-hand") * (not factor)) if code not in gone)
    if (states[states > 0] != DIFFERENT).any() and at.parameter_user:
        yield "use-in-module"
    yield "penalty"


# --- a gradient in which that of the step before is left over


def side_with_stale(step: Step, position: int) -> str:
    """The side whose gradient is a sum of the other's and of a's previous one, with positive weights; "" for neither.

    Previous is that of the step before, or, in an optimizer step that evaluates the model several times, of the call
    before. Compared are sketches; where one is missing, the answer is "".
    """
    union, table = int(step.divergences.site[position]), step.table
    found = step.last(union, "a")
    old = None if found is None or found[0].sketch is None else found[0].sketch[found[1]].astype(np.float64)
    sketches = table.sketches(union)
    if sketches is None or old is None or not (old.any() and np.isfinite(old).all()):
        return ""
    a, b = sketches
    return next((side for side, mixed, fresh in (("b", b, a), ("a", a, b)) if _is_mix(mixed, fresh, old)), "")


def _is_mix(mixed: Any, fresh: Any, old: Any) -> bool:
    """Whether `mixed` is a sum of `fresh` and `old` with positive weights.

    What the sum leaves of `mixed` has to be below 1e-5 of its norm and below 2% of the part of `old`.

    Args:
        mixed: sketch that may hold both, float64 (16,), finite as all are.
        fresh: sketch of the gradient without the previous one.
        old: sketch of the previous gradient.
    """
    basis = np.stack([fresh, old], axis=1)
    weights, _, rank, _ = np.linalg.lstsq(basis, mixed, rcond=1e-6)
    rest, share = float(np.linalg.norm(basis @ weights - mixed)), float(np.linalg.norm(weights[1] * old))
    return rank == 2 and min(weights) > 0 and rest < min(1e-5 * float(np.linalg.norm(mixed)), 2e-2 * share)
