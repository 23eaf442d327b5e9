"""Origin or propagated: decided for one divergence from what else differs in its step.

An origin is a record whose every input is equal and which is not. What counts as an input depends on what it is: a
module's output comes from its inputs, parameters, buffers, the modules inside it and the random state; a parameter
after the step from its gradient, its value and the optimizer's state before. Gradients recorded by tensor hooks are
totals over all consumers of a tensor, so in the backward pass nothing may differ earlier at all.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from introspect_cli.compare.join.sites import KINDS, PHASES
from introspect_cli.compare.reasons.facts import FORWARD, Facts, owner_of
from introspect_cli.compare.result import Reason, Role
from introspect_cli.records import Kind, Phase, Site

if TYPE_CHECKING:
    from collections.abc import Callable

_UPSTREAM = frozenset({Phase.DATA, Phase.FORWARD, Phase.EVAL})
_PASSES = frozenset({Phase.DATA, Phase.FORWARD, Phase.LOSS, Phase.BACKWARD})


@dataclass(frozen=True)
class Cause:
    """What made a divergence.

    Attributes:
        role: origin or propagated.
        reason: the kind of cause.
        module: the module whose code is meant, where that is not the record's own.
        after: the last module inside `module` that agreed.
        before: the first module inside `module` that did not.
        subject: for structure, the module or name that only one run has.
    """

    role: Role
    reason: Reason
    module: str = ""
    after: str = ""
    before: str = ""
    subject: str = ""


_COMPUTED = frozenset({Reason.MODULE, Reason.OWN_CODE, Reason.BACKWARD, Reason.BUFFER})
_PROPAGATED = Cause(Role.PROPAGATED, Reason.PROPAGATED)


def judge(facts: Facts, index: int) -> Cause:
    """Role and reason of one divergence of a step."""
    site = facts.sites[index]
    items = facts.items
    if items.row_a[index] < 0 or items.row_b[index] < 0:
        return _structure(facts, index, site)
    decide = _RULES.get(site.kind)
    cause = decide(facts, site, float(items.order[index])) if decide else _PROPAGATED
    if facts.gap and cause.reason in _COMPUTED and facts.holds_tensors(cause.module or site.fqn):
        return Cause(Role.PROPAGATED, Reason.GAP)
    return cause


def _origin(reason: Reason, **where: str) -> Cause:
    return Cause(Role.ORIGIN, reason, **where)


def _batch(facts: Facts, site: Site, _order: float) -> Cause:
    if facts.rng_differs() or site.fqn in facts.carried.loaders or facts.carried.rng:
        return _PROPAGATED
    return _origin(Reason.BATCH)


def _rng(facts: Facts, site: Site, _order: float) -> Cause:
    return _PROPAGATED if site.fqn in facts.carried.rng else _origin(Reason.RNG)


def _before_step(facts: Facts, order: float) -> bool:
    """Whether anything differs before this record, in the step or in what it began with."""
    carried = facts.carried
    return bool(carried.params or carried.buffers) or facts.before(order)


def span_start(facts: Facts, fqn: str, order: float) -> float | None:
    """When the call of a module that is running at `order` began: its last input before; None where unknown."""
    alignment = facts.alignment
    wanted = [
        union
        for union in alignment.by_fqn.get(fqn, [])
        if KINDS[alignment.kind[union]] is Kind.INPUT and PHASES[alignment.phase[union]] in FORWARD
    ]
    if not wanted:
        return None
    rows = np.isin(np.asarray(facts.pair.a.site), wanted)
    starts = np.asarray(facts.pair.a.sequence)[rows]
    starts = starts[starts <= order]
    if not len(starts):
        return None
    last = int(starts.max())
    calls = np.asarray(facts.pair.a.site)[rows]
    sequences = np.asarray(facts.pair.a.sequence)[rows]
    call = alignment.call[int(calls[int(np.argmax(sequences == last))])]
    same_call = [s for s, u in zip(sequences, calls, strict=True) if alignment.call[int(u)] == call]
    return float(min(same_call))


def _call_at(facts: Facts, start: float) -> int:
    """The call index of a module's input recorded at `start`."""
    row = int(np.argmax(np.asarray(facts.pair.a.sequence) == int(start)))
    return int(facts.alignment.call[int(facts.pair.a.site[row])])


def last_child(facts: Facts, fqn: str, low: float, high: float) -> str:
    """The last module inside `fqn` that gave an output between two places of the sequence; "" for none."""
    alignment = facts.alignment
    sequence = np.asarray(facts.pair.a.sequence)
    rows = np.flatnonzero((sequence >= low) & (sequence < high))
    prefix = fqn + "."
    for row in rows[np.argsort(sequence[rows])[::-1]]:
        union = int(facts.pair.a.site[row])
        if KINDS[alignment.kind[union]] is Kind.OUTPUT and alignment.fqn[union].startswith(prefix):
            name = alignment.fqn[union]
            child = prefix + name[len(prefix) :].partition(".")[0]
            return child if child in alignment.by_fqn else name
    return ""


def _input(facts: Facts, site: Site, order: float) -> Cause:
    parent = owner_of(site.fqn)
    while parent and span_start(facts, parent, order) is None:
        parent = owner_of(parent)
    if not parent:
        return _PROPAGATED if _before_step(facts, order) else _origin(Reason.SCRIPT)
    start = span_start(facts, parent, order)
    assert start is not None
    call = _call_at(facts, start)
    fed = (
        facts.differs(site.phase, Kind.INPUT, parent, call)
        or facts.inside("forward", parent, start, order - 0.25)
        or facts.tensors_differ(parent, order)
        or facts.rng_differs()
    )
    if fed:
        return _PROPAGATED
    return _origin(Reason.OWN_CODE, module=parent, after=last_child(facts, parent, start, order), before=site.fqn)


def _output(facts: Facts, site: Site, order: float) -> Cause:
    inputs = facts.recorded(site.phase, Kind.INPUT, site.fqn, site.call)
    start = facts.sequence_of(inputs) if inputs else None
    if start is None:
        return _PROPAGATED if _before_step(facts, order) else _origin(Reason.MODULE)
    fed = (
        facts.differs(site.phase, Kind.INPUT, site.fqn, site.call)
        or facts.inside("forward", site.fqn, start, order)
        or facts.tensors_differ(site.fqn, order)
        or facts.rng_differs()
    )
    if fed:
        return _PROPAGATED
    after = last_child(facts, site.fqn, start, order)
    return _origin(Reason.OWN_CODE, module=site.fqn, after=after) if after else _origin(Reason.MODULE)


def _loss(facts: Facts, _site: Site, order: float) -> Cause:
    upstream = facts.before(order, _UPSTREAM) or facts.rng_differs() or facts.carried.params
    return _PROPAGATED if upstream else _origin(Reason.LOSS)


def _backward(facts: Facts, _site: Site, order: float) -> Cause:
    return _PROPAGATED if _before_step(facts, order) or facts.rng_differs() else _origin(Reason.BACKWARD)


def _grad(facts: Facts, site: Site, order: float) -> Cause:
    upstream = (
        facts.before(order, _PASSES)
        or facts.rng_differs()
        or facts.carried.params
        or facts.before(order, frozenset({Phase.START}))
    )
    return _PROPAGATED if upstream or not site.fqn else _origin(Reason.GRADIENT)


def _start(facts: Facts) -> Cause:
    """A tensor as a step finds it: drawn at random where it is new, changed by nothing recorded where it is not."""
    return _PROPAGATED if facts.rng_differs() or facts.carried.diverged else _origin(Reason.INITIAL)


def _param(facts: Facts, site: Site, order: float) -> Cause:
    if site.phase is Phase.START:
        return _start(facts)
    carried = facts.carried
    states = {name for name, _ in carried.states}
    fed = site.fqn in carried.params or site.fqn in states
    if site.call or not facts.recorded(Phase.OPTIMIZER, Kind.GRAD, site.fqn, 0):
        fed = fed or facts.before(order, _PASSES)  # its gradient was not recorded, or is that of a later forward pass
    else:
        fed = fed or bool(facts.differing(Kind.GRAD, site.fqn))
    earlier = any(
        facts.items.order[i] < order and (facts.sites[i].phase is Phase.START or facts.sites[i].call)
        for i in facts.differing(Kind.PARAM, site.fqn)
    )
    return _PROPAGATED if fed or earlier else _origin(Reason.OPTIMIZER)


def _optimizer_state(facts: Facts, site: Site, order: float) -> Cause:
    return _param(facts, site, order)


def _buffer(facts: Facts, site: Site, order: float) -> Cause:
    if site.phase is Phase.START:
        return _start(facts)
    if site.fqn in facts.carried.buffers:
        return _PROPAGATED
    owner = owner_of(site.fqn)
    if facts.differing(Kind.INPUT, owner) or facts.differing(Kind.BUFFER, site.fqn)[:1] != [_index(facts, site)]:
        return _PROPAGATED
    seen = any(facts.alignment.site(union).kind is Kind.INPUT for union in facts.alignment.by_fqn.get(owner, []))
    if not seen and facts.before(order, FORWARD):
        return _PROPAGATED
    return _origin(Reason.BUFFER, module=owner)


def _index(facts: Facts, site: Site) -> int:
    return facts.sites.index(site)


def _op(facts: Facts, _site: Site, order: float) -> Cause:
    return _PROPAGATED if _before_step(facts, order) or facts.rng_differs() else _origin(Reason.OP)


_RULES: dict[Kind, Callable[[Facts, Site, float], Cause]] = {
    Kind.BATCH: _batch,
    Kind.RNG: _rng,
    Kind.INPUT: _input,
    Kind.OUTPUT: _output,
    Kind.LOSS: _loss,
    Kind.GRAD_INPUT: _backward,
    Kind.GRAD_OUTPUT: _backward,
    Kind.GRAD: _grad,
    Kind.PARAM: _param,
    Kind.OPTIMIZER_STATE: _optimizer_state,
    Kind.BUFFER: _buffer,
    Kind.OP_OUTPUT: _op,
}


def _structure(facts: Facts, index: int, site: Site) -> Cause:
    """A record that only one run has: what is the outermost thing that only this run has, and is this its first?"""
    first_of = facts.lonely("a" if facts.items.row_a[index] >= 0 else "b")
    subject = site.fqn
    head = owner_of(subject)
    while head and head in first_of.own:
        subject, head = head, owner_of(head)
    first = first_of.inside.get(subject, index)
    if facts.carried.diverged or first != index:
        return Cause(Role.PROPAGATED, Reason.STRUCTURE, subject=subject)
    earlier = bool(((facts.items.row_a[:index] >= 0) & (facts.items.row_b[:index] >= 0)).any())
    other = facts.alignment.names_b if facts.items.row_b[index] < 0 else facts.alignment.names_a
    role = Role.PROPAGATED if earlier and subject in other else Role.ORIGIN
    return Cause(role, Reason.STRUCTURE, subject=subject)
