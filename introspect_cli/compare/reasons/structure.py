"""Causes of a one-sided record: a module, parameter, call or gradient that the other run lacks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from introspect_cli.compare.reasons.base import cause
from introspect_cli.compare.reasons.update import find_changed_hands, find_other_optimizer
from introspect_cli.compare.say import WHOLE_VALUE, finds, found, often
from introspect_cli.compare.step.rests_on import Place, backward
from introspect_cli.compare.terms.evidence import Cause, Known
from introspect_cli.compare.terms.names import FORWARD, owner_of
from introspect_cli.compare.terms.result import Role, Size
from introspect_cli.compare.terms.sites import PHASES, kind_code, phase_code
from introspect_cli.compare.terms.table import EQUAL, OTHER
from introspect_cli.compare.terms.words import how_far, what
from introspect_cli.compare.values import tied_to
from introspect_cli.records import Kind, Phase

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from introspect_cli.compare.reasons.view import View
    from introspect_cli.compare.step.step import Step
    from introspect_cli.compare.terms.findings import Finding

_TENSORS = frozenset({Kind.PARAM, Kind.BUFFER})


def one_side_cause(step: Step, position: int) -> Cause | None:
    """Cause of a one-sided record; None where both runs have it. An origin if `subject_of` says so."""
    if not step.is_one_sided(position):
        return None
    subject, role = subject_of(step, position)
    return cause("structure", role=role, subject=subject)


def subject_of(step: Step, position: int) -> tuple[str, Role]:
    """(outermost module or name that one run alone has, ORIGIN if this record is its first in the step).

    PROPAGATED if anything differed before the step, or if the other run has the name and records differ before.
    """
    names, inside = step.one_sided("a" if step.divergences.row_a[position] >= 0 else "b")
    subject, head = step.sites[position].fqn, owner_of(step.sites[position].fqn)
    while head and head in names:
        subject, head = head, owner_of(head)
    if step.carried.diverged or inside.get(subject, position) != position:
        return subject, Role.PROPAGATED
    computed = step.alignment.kind[step.divergences.site[:position]] != kind_code(Kind.PRODUCT)  # files change nothing
    earlier = bool((computed & ~step.divergences.one_sided[:position]).any())
    other = step.alignment.names_b if step.divergences.row_b[position] < 0 else step.alignment.names_a
    return subject, Role.PROPAGATED if earlier and subject in other else Role.ORIGIN


def drawn_one_sided_start(step: Step) -> int | None:
    """Position of the first one-sided start tensor, if a parameter before it is equal; None otherwise.

    Drawing it moves the generator, so that later tensors differ; equal ones before show the same seed.
    """
    for position, site in enumerate(step.sites):
        if site.phase is not Phase.START or site.kind not in _TENSORS:
            continue
        if not step.is_one_sided(position):
            return None
        equal = (step.state == EQUAL) & (step.table.order_of < step.divergences.order[position])
        before = np.isin(step.of(Kind.PARAM, frozenset({Phase.START})), np.flatnonzero(equal))
        return position if before.any() else None
    return None


@finds("structure")
def find_why_one_sided(at: View) -> Iterator[Finding]:
    """Findings of the first clause in `_CLAUSES` that has any."""
    for kinds, clause in _CLAUSES:
        if at.site.kind in kinds and (findings := list(clause(at))):
            yield from findings
            break
    if drawn_one_sided_start(at.step) == at.position and at.step.rng_differs():
        names = [site.fqn for site in at.step.sites if site.kind is Kind.RNG and site.phase is Phase.START]
        yield found("random-follows", names=", ".join(names))


# --- why one run alone has it: each of these says so, or nothing where it is something else


def _operator(at: View) -> Iterator[Finding]:
    """Finding with the line of an operator that one run alone runs."""
    yield found("other-operators", line=at.first.source, other=at.lacks)


def _not_optimized(at: View) -> Iterator[Finding]:
    """Finding where one run's optimizers hold the parameter and the other's do not."""
    has, lacks = (at.setup.has(side, at.site.fqn) for side in (at.first.only, at.lacks))
    if has is True and lacks is False:
        yield found("not-in-optimizer", other=at.lacks)


def _tied(at: View) -> Iterator[Finding]:
    """Finding where the run that lacks the tensor has it tied to another name."""
    tied = {side: tied_to(tree.values(), at.site.fqn) for side, tree in zip("ab", at.step.modules, strict=True)}
    target = tied[at.lacks]
    if target and target != tied[at.first.only]:
        yield found("tied", other=at.lacks, target=target)


def _losses(at: View) -> Iterator[Finding]:
    """Finding where the numbers of losses in the step differ."""
    one, two = at.losses
    if one != two:
        yield found("losses", a=often(one), b=often(two))


def _did_not_run(at: View) -> Iterator[Finding]:
    """Finding where the module exists in both runs but did not run in one."""
    alignment, fqn = at.step.alignment, at.site.fqn
    of_forward = (union for union in alignment.by_fqn.get(fqn, []) if PHASES[alignment.phase[union]] in FORWARD)
    lacking = _side_without(at, of_forward)
    if lacking and not _missing(at):
        yield found("not-run", module=fqn, other=lacking)


def _side_without(at: View, unions: Iterable[int]) -> str:
    """The run that recorded none of these sites in the step, if the other recorded any; "" otherwise."""
    every = list(unions)
    recorded = [side for side in "ab" if at.recorded(side, every)]
    return OTHER[recorded[0]] if len(recorded) == 1 else ""


def _merged(at: View) -> Iterator[Finding]:
    """Finding where modules of one run are one in the other, with how the first shared value differs."""
    structure, shared = at.outcome.structure, at.outcome.shared
    for merge in structure.merges if structure is not None else ():
        parts, whole = tuple(map(owner_of, merge.parts)), owner_of(merge.whole)
        if at.cause.subject not in {*parts, whole} or not _missing(at):
            continue
        yield found("merged", parts=", ".join(parts), whole=whole, side=merge.side)
        if shared is not None and not at.narrowed:
            rounding = shared.size is Size.ROUNDING
            code = "first-shared-rounding" if rounding else "first-shared"
            yield found(code, name=what(shared.site), far=how_far(shared).strip(" ()"), step=shared.step)
        return


def _subject(at: View) -> Iterator[Finding]:
    """Finding where the subject has another class, or exists or runs in one run alone."""
    subject, side = at.cause.subject, at.first.only
    if not _missing(at):
        if classes := at.classes_of(subject):
            yield found("class", module=subject, a=classes[0], b=classes[1])
            return
        if at.site.kind in _TENSORS:  # a module that both have may lack a tensor in one run
            subject = at.site.fqn
        if not _missing(at, subject) and not _other_kind(at):
            return
    tensor = at.site.kind in _TENSORS and subject == at.site.fqn
    if replaced := at.classes_of(owner_of(subject)):
        yield found("class", module=owner_of(subject), a=replaced[0], b=replaced[1])
    trees = dict(zip("ab", at.step.modules, strict=True))
    module = trees[side].get(subject)
    name = at.first.module_class if subject == at.site.fqn else ""
    name = name if module is None else module.module_class
    # it may be there and not be called
    runs = not tensor and (subject in trees[at.lacks] or (module is not None and not owner_of(subject)))
    code = "runs-only" if runs else "exists-only"
    kind = at.site.kind.one.removeprefix("the ") if tensor else "module"
    named = f"in {at.lacks} a {other}" if tensor and (other := _other_kind(at)) else ""
    yield found(code, kind=kind, name=subject, side=side, cls=named if tensor else name)


def _other_kind(at: View) -> str:
    """`buffer` where the other run has a buffer of this parameter's name, or `parameter`; "" for neither."""
    if at.site.kind not in _TENSORS:
        return ""
    (kind,) = _TENSORS - {at.site.kind}
    named = (union for union in at.step.of(kind, frozenset(Phase)) if at.step.alignment.fqn[union] == at.site.fqn)
    return kind.one.removeprefix("the ") if at.recorded(at.lacks, named) else ""


def _missing(at: View, name: str = "") -> bool:
    """Whether the run without the record has no name at or below `name` (default: the cause's subject)."""
    alignment, subject = at.step.alignment, name or at.cause.subject or at.site.fqn
    names = alignment.names_a if at.lacks == "a" else alignment.names_b
    return not any(name == subject or name.startswith(f"{subject}.") for name in names)


def _calls(at: View) -> Iterator[Finding]:
    """Finding where a module runs a different number of times, or optimizers step in another order."""
    if not at.calls:
        return
    name, one, two = at.calls
    yield found("calls", module=name, a=often(one), b=often(two))
    whole = not owner_of(name) and at.losses[0] != at.losses[1]
    if whole and one * at.losses[1] == two * at.losses[0]:  # as many losses as batches
        yield found("accumulated")
    one_of, two_of = (sorted(_graded(at, side)) for side in "ab")
    if one_of and two_of and not {*one_of} & {*two_of}:
        yield found("optimizers-order", a=one_of[0], b=two_of[0])


def _paths(at: View) -> Iterator[Finding]:
    """Finding where one call has values at different paths."""
    alignment, site = at.step.alignment, at.site
    given: list[list[str]] = []
    for side in "ab":
        unions = at.recorded(side, at.step.of_call(site.phase, site.kind, site.fqn, site.call))
        given.append([alignment.path[u] or WHOLE_VALUE for u in unions])
    if not all(given):
        return
    alone = [[path for path in mine if path not in other] for mine, other in (given, given[::-1])]
    a, b = (f"{', '.join(paths[:_PATHS])}{', ...' * (len(paths) > _PATHS)}" for paths in alone)
    yield found("arguments" if site.kind is Kind.INPUT else "structure-of-value", a=a, b=b)


def _unused(at: View) -> Iterator[Finding]:
    """Finding where the optimizers step in another order, or the gradient exists but no optimizer takes it."""
    setup, (one, two) = at.setup, at.optimizers
    if not one or not two:  # then by whose parameters' gradients are there
        one, two = (setup.holders(side, _graded(at, side)) for side in "ab")
    else:
        two = setup.as_in_a(two)
    # each run has the optimizers that step in either here, and none of them steps in both
    both = {*one, *two}
    swapped = one and two and not {*one} & {*two} and all(both <= held.keys() for held in setup.named.values())
    if one != two and (sorted(one) == sorted(two) or swapped):
        yield found("optimizers-order", a=", ".join(one), b=", ".join(two))
        return
    (passed,) = backward(at.step, Place(at.site, np.inf))
    if passed.known in {Known.EQUAL, Known.WITHIN}:
        yield found("gradient-not-taken", other=at.lacks)


def _graded(at: View, side: str) -> set[str]:
    """Parameters with a gradient recorded at an optimizer step, in one run."""
    gradients = at.step.of(Kind.GRAD, frozenset({Phase.OPTIMIZER}))
    return {at.step.alignment.fqn[union] for union in at.recorded(side, gradients)}


def _other_class(at: View) -> Iterator[Finding]:
    """Finding where the stepping optimizers are of other classes."""
    one, two = ({name.partition("#")[0] for name in names} for names in at.steppers)
    if one != two:
        yield from find_other_optimizer(at)


def _no_gradient(at: View) -> Iterator[Finding]:
    yield found("no-gradient", other=at.lacks)


def _not_stepped(at: View) -> Iterator[Finding]:
    """Finding where no optimizer steps the parameter in one run, or its model has not run there yet."""
    root, alignment = at.site.fqn.partition(".")[0], at.step.alignment
    sites = at.table.sites_a if at.lacks == "a" else at.table.sites_b
    before = sites[alignment.phase[sites] != phase_code(Phase.OPTIMIZER)]
    ran = any(alignment.fqn[site].partition(".")[0] == root for site in before.tolist())
    if at.site.phase is Phase.START and not ran and not at.site.call and not at.step.is_recorded_before(at.site.fqn):
        yield found("model-not-run", other=at.lacks)
    elif at.site.phase is Phase.OPTIMIZER:
        yield found("not-stepped", other=at.lacks)


_PATHS = 4
_UPDATED = frozenset({Kind.GRAD, Kind.OPTIMIZER_STATE})
_GRADIENTS = frozenset({Kind.GRAD, Kind.GRAD_INPUT, Kind.GRAD_OUTPUT})
_ALL = frozenset(Kind)
_CLAUSES: tuple[tuple[frozenset[Kind], Callable[[View], Iterator[Finding]]], ...] = (
    (frozenset({Kind.OP_OUTPUT}), _operator),
    (_UPDATED, _not_optimized),
    (_UPDATED, find_changed_hands),
    (frozenset({Kind.OPTIMIZER_STATE}), _other_class),
    (_ALL, _tied),
    (frozenset({Kind.LOSS}), _losses),
    (_ALL, _did_not_run),
    (_ALL, _merged),
    (_ALL, _subject),
    (_ALL, _calls),
    (frozenset({Kind.GRAD}), _unused),
    (_GRADIENTS, _no_gradient),
    (_ALL, _paths),
    (frozenset({Kind.PARAM}), _not_stepped),
)
"""Asked in this order, each of records of these kinds; the first that says something is the reason."""
