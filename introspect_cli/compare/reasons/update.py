"""Reasons for parameters, optimizer state and buffers that differ after a step with equal inputs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from introspect_cli.compare.evidence import Cause, Known, Thing, with_state
from introspect_cli.compare.names import owner_of
from introspect_cli.compare.reasons.base import cause, evidence_of
from introspect_cli.compare.reasons.ranks import side_with_copies
from introspect_cli.compare.say import finds, found
from introspect_cli.compare.settings.hyperparameters import hyperparameter_changes
from introspect_cli.compare.settings.settings import chooses_kernel
from introspect_cli.compare.step import (
    PASSES,
    Place,
    gradients_in_step,
    inputs,
    lacks_gradient,
    owing_side,
    state_before,
    value_before,
)
from introspect_cli.compare.table import OTHER
from introspect_cli.records import Kind, Phase, Site

if TYPE_CHECKING:
    from collections.abc import Iterator

    from introspect_cli.compare.reasons.view import View
    from introspect_cli.compare.result import Finding
    from introspect_cli.compare.step import Step


def optimizer_cause(step: Step, position: int) -> Cause | None:
    """Cause `optimizer` of a parameter or state after an update; None where something that goes into it differs.

    That is the parameter or its state before the step, its gradient (without a record of it, anything in the passes),
    or an earlier update of it in the step. None also for other phases and for parameters without a gradient. A new
    state at the start of step 0 has this cause without evidence.
    """
    site, order = step.sites[position], step.orders[position]
    new = site.phase is Phase.START and site.kind is Kind.OPTIMIZER_STATE and step.number == step.table.step_b == 0
    if new and not step.begins.resumed:
        return cause("optimizer")
    if site.phase is not Phase.OPTIMIZER or (site.kind is Kind.PARAM and lacks_gradient(step, site.fqn)):
        return None
    seen = not site.call and len(step.of(Kind.GRAD, Phase.OPTIMIZER, fqn=site.fqn, call=0)) > 0
    fed = bool(step.differing(Kind.GRAD, site.fqn)) if seen else step.differs_before(order, PASSES)
    earlier = any(
        step.divergences.order[i] < order and (step.sites[i].phase is Phase.START or step.sites[i].call)
        for i in step.differing(Kind.PARAM, site.fqn)
    )
    if fed or earlier or site.fqn in {*step.begins.names, *(name for name, _ in step.begins.states)}:
        return None
    place = Place(site, order)
    before = state_before(step, place)
    if site.kind is Kind.PARAM:
        # what equal steps before left is equal; what a checkpoint left may be lost
        told = {Known.WITHIN, Known.UNSEEN if step.comparison.offset else Known.WITHIN}
        states = [fact._replace(needed=fact.known is Known.UNSEEN) for fact in before if fact.known in told]
        before = [*value_before(step, place), *states]
    if site.call:
        return cause("optimizer", *before, *gradients_in_step(step, place))
    evidence = evidence_of("optimizer", step, position)
    if with_state(evidence, Known.UNSEEN) and hyperparameter_changes(step.table, step.last_text):
        evidence = [fact._replace(needed=False) for fact in evidence]  # a cause is on record all the same
    return cause("optimizer", *evidence, *before)


# --- what is found of an optimizer's step


@finds("optimizer")
def find_other_optimizer(at: View) -> Iterator[Finding]:
    """Finding where optimizers of other names, or in another order, step.

    Else where another of the same optimizers holds the parameter.
    """
    a, b = at.steppers
    if a and b and a != b:
        yield found("other-optimizer", a=", ".join(a), b=", ".join(b))
    elif hands := at.setup.other_holders(at.site.fqn):
        yield found("changed-hands", a=", ".join(hands[0]), b=", ".join(hands[1]))


@finds("optimizer")
def find_partial_sum(at: View) -> Iterator[Finding]:
    """Finding where the ranks of one run had not yet added up the gradient as the optimizer took it."""
    if at.cause.rests_on(Thing.GRADIENT_SUM):
        sites = at.step.of(Kind.GRAD, Phase.OPTIMIZER, fqn=at.site.fqn)
        yield found("owed", side=side_with_copies(at.first) or owing_side(at.step, sites))


@finds("optimizer")
def find_fresh_state(at: View) -> Iterator[Finding]:
    """Finding where one run's optimizer counts 1 step and the other's more or fewer.

    The first differing count of the parameter decides.
    """
    unions = at.step.of(Kind.OPTIMIZER_STATE, fqn=at.site.fqn).tolist()
    for union in (u for u in unions if "step" in at.step.alignment.path[u]):
        a, b = at.table.plain(union, "a"), at.table.plain(union, "b")
        if a != b and "1" in {a, b} and None not in {a, b}:
            yield found("fresh-state", side="a" if a == "1" else "b", a=a, b=b)
            return


@finds("optimizer")
def find_hyperparameters(at: View) -> Iterator[Finding]:
    """Finding for each hyper-parameter of `View.tuned`: on record where it alone explains the update.

    Likely are those of some groups only, those that one run lacks, those that choose a kernel, notes of a script
    (`_FACTOR`), and all where anything else may explain it: evidence was not observed, other optimizers step, gradients
    were not added up, or the state is fresh.
    """
    one, two = at.optimizers
    others = bool(with_state(at.cause.evidence, Known.UNSEEN) or at.cause.rests_on(Thing.GRADIENT_SUM))
    others = others or bool(one and two and one != two) or any(find_fresh_state(at))
    for change in at.tuned:
        slight = None in (change.a, change.b) or chooses_kernel(change.name) or change.name.startswith(_FACTOR)
        code = "hyperparameter" + "-elsewhere" * (change.name != change.about or slight or others)
        yield found(code, name=change.name, a=change.a, b=change.b)


_FACTOR = "lr_"
"""How a script's notes begin of what it makes a group's rates of; no optimizer reads them."""


@finds("batch", "script", "optimizer", "by_hand", "buffer", "outside")
def find_unchanged(at: View) -> Iterator[Finding]:
    """Finding where one run alone has the value of the last time again, or alone changes it."""
    reason, only = at.cause.reason, at.first.only
    listed = reason == "outside" and len({*at.step.comparison.lists_starts}) > 1  # of one run, copies
    still = OTHER.get(only, "") if only or listed else at.step.unchanged_side(at.union)
    if still and reason in {"by_hand", "buffer", "outside"}:
        yield found("changed-in-one", side=OTHER[still])
    elif still:
        names = at.steppers[still == "b"] if reason == "optimizer" else []
        yield found("untouched" if reason == "optimizer" else "repeated", side=still, name=", ".join(names))


def left_in_optimizer(at: View) -> Iterator[str]:
    """Codes of the remaining causes; of a state at the start of a step only `checkpoint`."""
    yield "checkpoint" if at.site.phase is Phase.START else "optimizer"
    if at.site.call:
        yield "zero-grad"


# --- tensors that a step changes and no optimizer


def by_hand_cause(step: Step, position: int) -> Cause | None:
    """Cause `by_hand`; None where something differs before the change, or the record is no change by hand.

    A change by hand is recorded in the forward pass, of a buffer before a call of its module, or at the optimizer step
    (its first call) of a parameter without a gradient. In the forward pass, before is until the owner's last call
    ended.
    """
    site = step.sites[position]
    without = site.phase is Phase.OPTIMIZER and not site.call and lacks_gradient(step, site.fqn)
    if not (without or site.phase is Phase.FORWARD) or is_fed_by_then(step, position):
        return None
    return cause("by_hand", *evidence_of("by_hand", step, position))


def is_fed_by_then(step: Step, position: int) -> bool:
    """Whether something differs before a tensor changed: of a buffer or a forward pass, by its owner's last call.

    It is recorded at the end of the pass. Where its owner is not called, before the record.
    """
    site, order = step.sites[position], step.orders[position]
    in_call = site.kind is Kind.BUFFER or site.phase is Phase.FORWARD
    ran = [call.ended for call in step.calls if in_call and call.fqn == owner_of(site.fqn)]
    fed = step.rng_differs() or bool(step.begins.names)
    return fed or step.differs_before(min(max(ran, default=order), order))


def buffer_cause(step: Step, position: int) -> Cause | None:
    """Cause `buffer` of a buffer's first divergence: what its module's call rests on is equal, and it is not.

    None where anything differs before the module's last call ended, or an input of it in any call, and for values
    before a call or at the start.
    """
    site, owner = step.sites[position], owner_of(step.sites[position].fqn)
    if site.phase is not Phase.OPTIMIZER or step.differing(Kind.INPUT, owner) or is_fed_by_then(step, position):
        return None
    place = Place(Site(Phase.FORWARD, Kind.INPUT, owner), step.orders[position], owner)
    return cause("buffer", *inputs(step, place), *evidence_of("buffer", step, position), module=owner)
