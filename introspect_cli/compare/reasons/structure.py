"""Causes of a one-sided record: a module, parameter, call or gradient that the other run lacks."""

from __future__ import annotations

from itertools import takewhile
from typing import TYPE_CHECKING

import numpy as np

from introspect_cli.compare.evidence import Cause, Known
from introspect_cli.compare.ledger import TENSORS
from introspect_cli.compare.match import tied_to
from introspect_cli.compare.names import DISPLACED, FORWARD, ancestors, owner_of
from introspect_cli.compare.reasons.base import cause
from introspect_cli.compare.reasons.forward import find_call_counts, find_class
from introspect_cli.compare.reasons.update import find_other_optimizer
from introspect_cli.compare.result import Role
from introspect_cli.compare.say import WHOLE_VALUE, finds, found, often, some
from introspect_cli.compare.step import Place, backward
from introspect_cli.compare.table import OTHER, PHASES
from introspect_cli.records import Kind, Phase

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from collections.abc import Set as AbstractSet

    from introspect_cli.compare.reasons.view import View
    from introspect_cli.compare.result import Finding
    from introspect_cli.compare.step import Step


def one_side_cause(step: Step, position: int) -> Cause | None:
    """Cause `structure` of a record that one run alone has; `subject_of` gives its role.

    None where both have it, and of a buffer in the forward pass, which that run alone has changed.
    """
    site = step.sites[position]
    if not step.alone[position] or (site.kind is Kind.BUFFER and site.phase is Phase.FORWARD):
        return None
    subject, role = subject_of(step, position)
    return cause("structure", role=role, subject=subject)


def subject_of(step: Step, position: int) -> tuple[str, Role]:
    """The outermost module or name around a record that one run alone has, and the record's role.

    ORIGIN if the record is the first of that module in the step; PROPAGATED if it is not, or if anything has diverged
    before. Where an earlier record of both runs, saved files left out, differs, it is the outermost that the other run
    lacks; PROPAGATED where that has them all.
    """
    names, inside = step.one_sided["a" if step.divergences.row_a[position] >= 0 else "b"]
    fqn = step.sites[position].fqn
    every = [fqn, *takewhile(names.__contains__, ancestors(fqn))]
    if step.begins.diverged or inside.get(every[-1], position) != position:
        return every[-1], Role.PROPAGATED
    computed = ~step.divergences.are(Kind.PRODUCT)[:position]  # files change nothing
    if not (computed & ~step.divergences.one_sided[:position]).any():
        return every[-1], Role.ORIGIN
    other = step.alignment.names[bool(step.divergences.row_b[position] < 0)]
    lacking = next((name for name in reversed(every) if name not in other), "")
    return lacking or every[-1], Role.ORIGIN if lacking else Role.PROPAGATED


@finds("structure")
def find_why_one_sided(at: View) -> Iterator[Finding]:
    """Findings of the first function in `_CLAUSES` that gives any."""
    every = (list(clause(at)) for kinds, clause in _CLAUSES if at.site.kind in kinds)
    yield from next(filter(None, every), ())


# --- why one run alone has it: each of these says so, or nothing where it is something else


def _find_not_optimized(at: View) -> Iterator[Finding]:
    """Finding where optimizers of the run with the record hold the parameter, and those of the other run do not."""
    has, lacks = (at.setup.has(side, at.site.fqn) for side in (at.first.only, at.side_without))
    if has is True and lacks is False:
        yield found("not-stepped", other=at.side_without)


def _find_other_optimizer(at: View) -> Iterator[Finding]:
    """Finding where optimizers of other classes step in b; else where another of them holds the parameter."""
    one, two = ({name.partition("#")[0] for name in names} for names in at.steppers)
    if (at.site.kind is Kind.OPTIMIZER_STATE and one != two) or at.setup.other_holders(at.site.fqn):
        yield from find_other_optimizer(at)


def _find_tied(at: View) -> Iterator[Finding]:
    """Finding where the run without the tensor has it tied to another name, and the other run has not that tie."""
    tied = {side: tied_to(tree.values(), at.site.fqn) for side, tree in zip("ab", at.step.modules, strict=True)}
    target = tied[at.side_without]
    if target and target != tied[at.first.only]:
        yield found("tied", other=at.side_without, target=target)


def _find_loss_counts(at: View) -> Iterator[Finding]:
    """Finding where the runs have different numbers of losses in the step."""
    one, two = at.losses
    if one != two:
        yield found("calls", module="backward", a=often(one), b=often(two))


def _find_not_run(at: View) -> Iterator[Finding]:
    """Finding where the module is in both runs by name, and ran in the forward pass of one alone in this step."""
    alignment, fqn = at.step.alignment, at.site.fqn
    of_forward = [union for union in alignment.by_fqn.get(fqn, []) if PHASES[alignment.phase[union]] in FORWARD]
    ran_in = [side for side in "ab" if at.recorded(side, of_forward)]
    if len(ran_in) == 1 and not _is_name_missing(at, at.cause.subject):
        yield found("not-run", module=fqn, other=OTHER[ran_in[0]])


def _find_subject(at: View) -> Iterator[Finding]:
    """Findings where the cause's subject, or the module around it, has another class, or only one run has or runs it.

    For a parameter or buffer of a module that both have, the subject is the tensor.
    """
    subject, sides = at.cause.subject, (at.first.only, at.side_without)
    classes = [*find_class(at, subject)]
    if at.site.kind in TENSORS and not classes and not _is_name_missing(at, subject):
        subject = at.site.fqn  # a module that both have may lack a tensor in one run
    yield from classes or find_class(at, owner_of(subject))
    tensor = at.site.kind in TENSORS and subject == at.site.fqn
    other = at.step.comparison.b if at.side_without == "b" else at.step.comparison.a
    # a tensor of that name may be another one's partner
    if _is_name_missing(at, subject) and not (tensor and subject.removesuffix(DISPLACED) in other.sites.fqn):
        here, there = (at.step.modules[side == "b"].get(subject) for side in sides)
        # it may be there and not be called
        runs = there is not None or (here is not None and not owner_of(subject))
        kind = at.site.kind.one.removeprefix("the ") if tensor else "module"
        of_class = "" if here is None else here.module_class
        yield found("runs-only" if runs else "exists-only", kind=kind, name=subject, side=sides[0], cls=of_class)


def _is_name_missing(at: View, name: str) -> bool:
    """Whether the run without the record has no name equal to or below `name`."""
    return name not in at.step.alignment.around[at.side_without == "b"]


def _find_paths(at: View) -> Iterator[Finding]:
    """Finding with the paths that each run alone has in a call that both made.

    Nothing where a run did not record the call.
    """
    path, site = at.step.alignment.path, at.site
    unions = at.step.of(site.kind, site.phase, fqn=site.fqn, call=site.call).tolist()
    one, two = ([path[union] or WHOLE_VALUE for union in at.recorded(side, unions)] for side in "ab")
    if one and two:
        a, b = (some([each for each in mine if each not in other]) for mine, other in ((one, two), (two, one)))
        yield found("arguments" if site.kind is Kind.INPUT else "structure-of-value", a=a, b=b)


def _find_unused_gradient(at: View) -> Iterator[Finding]:
    """Finding where optimizers step in another order, else where no optimizer takes the gradient that was computed.

    Another order is as many of those that both runs have. The second only where the backward pass is equal or within
    tolerance.
    """
    setup, (one, two) = at.setup, at.optimizers
    if not one or not two:  # then by whose parameters' gradients are there
        gradients, fqns = at.step.of(Kind.GRAD, Phase.OPTIMIZER), at.step.alignment.fqn
        one, two = (setup.holders(side, {fqns[u] for u in at.recorded(side, gradients)}) for side in "ab")
    else:
        two = setup.as_in_a(two)
    in_both = all({*one, *two} <= held.keys() for held in setup.named.values())
    if one != two and len(one) == len(two) and in_both:
        yield found("optimizers-order", a=", ".join(one), b=", ".join(two))
    elif backward(at.step, Place(at.site, np.inf))[0].known in {Known.EQUAL, Known.WITHIN}:
        yield found("gradient-not-taken", other=at.side_without)


def _find_not_stepped(at: View) -> Iterator[Finding]:
    """Finding where no optimizer steps the parameter in one run, or where its model has not run there before.

    The latter at the start of the first step that has it, the former in the optimizer phase; nothing otherwise.
    """
    root, alignment = at.site.fqn.partition(".")[0], at.step.alignment
    others = (u for u in at.table.rows_of[at.side_without] if PHASES[alignment.phase[u]] is not Phase.OPTIMIZER)
    ran = any(alignment.fqn[union].partition(".")[0] == root for union in others)
    if at.site.phase is Phase.START and not ran and not at.step.is_recorded_before(at.site.fqn):
        yield found("model-not-run", other=at.side_without)
    elif at.site.phase is Phase.OPTIMIZER:
        yield found("not-stepped", other=at.side_without)


_UPDATED = frozenset({Kind.GRAD, Kind.OPTIMIZER_STATE})
_GRADIENTS = frozenset({Kind.GRAD, Kind.GRAD_INPUT, Kind.GRAD_OUTPUT})
_ALL = frozenset(Kind)
_CLAUSES: tuple[tuple[AbstractSet[Kind], Callable[[View], Iterable[Finding]]], ...] = (
    ({Kind.OP_OUTPUT}, lambda at: [found("other-operators", other=at.side_without)]),
    (_UPDATED, _find_not_optimized),
    (_UPDATED, _find_other_optimizer),
    (_ALL, _find_tied),
    ({Kind.LOSS}, _find_loss_counts),
    (_ALL, _find_not_run),
    (_ALL, _find_subject),
    (_ALL, find_call_counts),
    ({Kind.GRAD}, _find_unused_gradient),
    (_GRADIENTS, lambda at: [found("no-gradient", other=at.side_without)]),
    (_ALL, _find_paths),
    ({Kind.PARAM}, _find_not_stepped),
)
"""Asked in this order, each of records of these kinds; the first that says something is the reason."""
