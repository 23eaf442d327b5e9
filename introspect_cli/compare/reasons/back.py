"""Gradients: of what flows through modules, and of parameters as an optimizer step finds them.

Clipping by a norm, unscaling and averaging over accumulated batches multiply all gradients of an optimizer by one
factor. So where a gradient differs by no factor, or where another one that is not zero is equal, they were not what
changed. A missing zero_grad adds the gradient of the step before, which the sketches show. Several ranks or several
backward passes in a step are left out of this: what clips a part of a gradient before it is added up leaves no factor
in the sum.
"""

from __future__ import annotations

from dataclasses import replace
from enum import Enum
from typing import TYPE_CHECKING, Any

import numpy as np

from introspect_cli.compare.reasons.base import cause, evidence_of
from introspect_cli.compare.reasons.ranks import reduction_factor
from introspect_cli.compare.say import finds, found
from introspect_cli.compare.step.rests_on import PASSES
from introspect_cli.compare.terms.distance import ROUNDING
from introspect_cli.compare.terms.evidence import Cause, Known, with_state
from introspect_cli.compare.terms.sites import PHASES
from introspect_cli.compare.terms.table import EQUAL, OTHER
from introspect_cli.records import Kind, Phase
from introspect_cli.store.format.batch import scale_between

if TYPE_CHECKING:
    from collections.abc import Iterator

    from introspect_cli.compare.reasons.view import View
    from introspect_cli.compare.step.step import Step
    from introspect_cli.compare.terms.findings import Finding
    from introspect_cli.compare.terms.table import Table


_REST = 1e-5
"""What is left of a gradient beside the best multiple of the other, where that is no rounding of a factor."""

_MEASURED, _OF_THE_REST = 1e-4, 0.3


class Handling(str, Enum):
    """A treatment of gradients between backward pass and update, as the code of what is left."""

    CLIPPING = "clipping"
    UNSCALING = "unscaling"
    ACCUMULATION = "accumulation"
    ZERO_GRAD = "zero-grad"
    BY_HAND = "gradient-by-hand"


TOGETHER = frozenset({Handling.CLIPPING, Handling.UNSCALING, Handling.ACCUMULATION})
"""What multiplies all gradients by one factor, where a step has one backward pass."""


def excluded_handling(at: View) -> frozenset[Handling]:
    """Kinds of gradient handling that the records rule out; none with several ranks, losses or sparse gradients."""
    several = max(run.world_size for run in at.runs) > 1 or at.losses != (1, 1)
    if several or at.site.call or _sparse_sides(at):
        return frozenset()
    some_equal = max(map(len, at.optimizers)) < 2 and has_equal_gradient(at)
    gone = TOGETHER if some_equal or _no_factor(at) else frozenset()
    nothing_left = some_equal and (not at.first.step or has_equal_gradient(at, also_before=True))
    return gone | {Handling.ZERO_GRAD} if nothing_left or _not_of_before(at) else gone


def _sparse_sides(at: View) -> str:
    """The runs in which the gradient is sparse: "", "a", "b" or "ab"; sketches do not tell positions there."""
    both = zip("ab", (at.first.a, at.first.b), strict=True)
    return "".join(side for side, summary in both if summary is not None and summary.layout.is_sparse)


def has_equal_gradient(at: View, *, also_before: bool = False) -> bool:
    """Whether any gradient of the step is equal and not zero; `also_before`: nor zero in the previous step."""
    unions = map(int, at.step.of(Kind.GRAD, frozenset({at.site.phase})))
    tables = [at.table, *([at.step.before] if also_before else [])]
    return any(at.step.state[union] == EQUAL and all(_is_some(table, union) for table in tables) for union in unions)


def _is_some(table: Table | None, union: int) -> bool:
    """Whether run a has a gradient at this site whose mean absolute value is above 0."""
    row, means = (None, None) if table is None else (table.rows_of("a").get(union), table.a.floats.get("amean"))
    return row is not None and means is not None and float(means[row]) > 0


def _not_of_before(at: View) -> bool:
    """Whether the difference is no mix of this gradient and the previous step's; False without sketches."""
    before = at.step.before
    old = None if before is None else before.sketch(at.union, "a")
    sketches = at.table.sketches(at.union)
    if sketches is None or old is None:
        return False
    a, b = sketches
    distance, basis = float(np.linalg.norm(b - a)), np.stack([a, old], axis=1)
    if distance < _MEASURED * float(np.linalg.norm(a)):
        return False  # of so small a difference, sketches have no direction
    rest = b - basis @ np.linalg.lstsq(basis, b, rcond=None)[0]
    return float(np.linalg.norm(rest)) > _OF_THE_REST * distance


def _no_factor(at: View) -> bool:
    """Whether no factor maps a's gradient to b's (rest over `_REST`); False without sketches or in coarse dtypes."""
    first = at.first
    if first.a is None or first.b is None or first.scale is not None or first.a.layout.numel <= 16:
        return False
    if max(ROUNDING.get(summary.layout.dtype, 1.0) for summary in (first.a, first.b)) > ROUNDING["float32"]:
        return False
    sketches = at.table.sketches(at.union)
    return sketches is not None and scale_between(*sketches)[1] > _REST


# --- through modules


@finds("backward")
def find_recomputation(at: View) -> Iterator[Finding]:
    """Finding where the module was recomputed in the step (activation checkpointing)."""
    step, alignment = at.step, at.step.alignment
    unions = alignment.by_fqn.get(at.site.fqn, [])
    if any(step.state[union] and PHASES[alignment.phase[union]] is Phase.RECOMPUTE for union in unions):
        yield found("recomputed", module=at.site.fqn)


def left_in_backward(at: View) -> Iterator[str]:
    """Remaining causes: the backward pass of the module, or of what uses its output, or the loss code."""
    if at.site.kind is Kind.GRAD_INPUT:
        yield "backward-through"
    else:
        yield from ("backward-of-user", "loss-code")


# --- of parameters


def gradient_cause(step: Step, position: int) -> Cause | None:
    """Cause where the forward and backward pass and start values do not differ before; None otherwise."""
    site, order = step.sites[position], step.order_at(position)
    upstream = step.differs_before(order, PASSES | {Phase.START}) or step.rng_differs() or step.carried.params
    if upstream or not site.fqn:
        return None
    passes = evidence_of("gradient", step, position)
    if with_state(passes, Known.UNSEEN) and stale_share(step, position)[0]:
        passes = [replace(fact, needed=False) for fact in passes]  # the values alone tell the cause
    return cause("gradient", *passes)


@finds("gradient")
def find_sparse_gradient(at: View) -> Iterator[Finding]:
    """Finding where the gradient is sparse in one run alone."""
    sides = _sparse_sides(at)
    if len(sides) == 1:
        yield found("sparse", side=sides, other=OTHER[sides])


@finds("plain", "gradient")
def find_stale_gradient(at: View) -> Iterator[Finding]:
    """Finding where one run's gradient contains the previous step's (a missing `zero_grad`)."""
    side, _ = stale_share(at.step, at.position)
    if side:
        yield found("stale", side=side, of="evaluation" if at.site.call else "step")


@finds("gradient")
def find_whole_factor(at: View) -> Iterator[Finding]:
    """Finding where the factor between the runs is a number of ranks or batches: a sum instead of a mean."""
    factor = reduction_factor(at)
    if factor and at.first.scale is not None:
        yield found("summed", times=f"{at.first.scale:.6g}", of=factor)


def left_in_gradient(at: View) -> Iterator[str]:
    """Codes of causes that are not excluded.

    `reduction` with several ranks; kinds of handling; `use-in-module` where the gradients differ and a module uses the
    parameter; `penalty`.
    """
    gone, differ = excluded_handling(at), at.gradients
    if max(run.world_size for run in at.runs) > 1:
        yield "reduction"
    if at.first.scale is not None and not gone >= TOGETHER:
        yield from ("clipping", "unscaling", "accumulation")
    elif at.rounding and Handling.CLIPPING in gone and at.parameter_user:
        yield "rounding-in-backward"
        return
    else:
        if Handling.CLIPPING in gone:
            yield "clipping-by-value"
        yield from (handling.value for handling in Handling if handling not in gone)
    if differ[0] != differ[1] and at.parameter_user:
        yield "use-in-module"
    yield "penalty"


# --- a gradient in which that of the step before is left over


def stale_share(step: Step, position: int) -> tuple[str, float]:
    """(side whose gradient is the other's plus `share` times the previous one, share); ("", 0.0) where no side is."""
    site, union = step.sites[position], int(step.divergences.site[position])
    table = step.table
    if site.call:  # an optimizer that evaluates the model several times a step
        earlier = step.of_call(site.phase, Kind.GRAD, site.fqn, site.call - 1)
        old = table.sketch(earlier[0], "a") if earlier else None
    else:
        found = step.last(union, "a")
        old = None if found is None or found[0].sketch is None else found[0].sketch[found[1]].astype(np.float64)
    sketches = table.sketches(union)
    if sketches is None or old is None or not (old.any() and np.isfinite(old).all()):
        return "", 0.0
    a, b = sketches
    shares = (("b", _mix(b, a, old)), ("a", _mix(a, b, old)))
    return next((each for each in shares if each[1]), ("", 0.0))


def _mix(mixed: Any, fresh: Any, old: Any) -> float:
    """Share of `old` relative to `fresh` where `mixed` is a positive combination of both; 0.0 where it is not.

    The rest has to be below 1e-5 of the whole and 2% of the share of `old`.
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
