"""All origins of the first diverging step with their causes.

A step may diverge in several places that have nothing to do with one another: another seed and another learning rate,
two branches of a model. Who mends the first alone finds the next tomorrow. So every divergence that rests on nothing
that differs is told with its cause; where many have one cause (the parameters of one optimizer), the first of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from introspect_cli.compare.reasons.base import judge
from introspect_cli.compare.resumed.parts import PLACE
from introspect_cli.compare.settings.hyperparameters import hyperparameter_changes
from introspect_cli.compare.terms.evidence import Cause, Known
from introspect_cli.compare.terms.names import generator_of
from introspect_cli.compare.terms.result import Role
from introspect_cli.compare.walk.choose import is_drawn_from
from introspect_cli.records import Kind, Phase, Site

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from introspect_cli.compare.step.step import Step
    from introspect_cli.compare.terms.findings import Part, Resumption


_JUDGED = 300
"""Divergences that are looked at, from the first on and of what the optimizers leave: nearly all follow from others."""

_MOST = 8

_AT_ITS_PLACE = frozenset({"rng", "initial", "outside", "batch", "module", "own_code", "op", "optimizer", "buffer"})
"""Reasons that say of one record that what went into it is equal, whatever differs elsewhere."""


def origins(step: Step, positions: Sequence[int], first: Site, cause: Cause) -> list[tuple[int, Cause]]:
    """The other origins among some divergences of a step, one for each cause, in order."""
    seen = {_key(step, first, cause)}
    others: list[tuple[int, Cause]] = []
    for position in _looked_at(step, positions):
        site = step.sites[position]
        if site == first or step.is_one_sided(position):
            continue
        other = judge(step, position)
        key = _key(step, site, other)
        if other.role is not Role.ORIGIN or other.reason not in _AT_ITS_PLACE or key in seen:
            continue
        if any(fact.known is not Known.EQUAL for fact in other.evidence):
            continue  # it may come from what was not seen, or have grown from what was let pass
        if site.call and other.reason in {"module", "own_code"}:
            continue  # its first call agrees, or is listed: what it keeps from call to call may follow from the rest
        if other.reason == "initial" and first.phase is Phase.START:
            continue  # one that is drawn or not takes numbers from all that are drawn after it
        if _has_effect(step, position, other):
            seen.add(key)
            others.append((position, other))
            if len(others) == _MOST:
                break
    return others


def _looked_at(step: Step, positions: Sequence[int]) -> Iterator[int]:
    yield from positions[:_JUDGED]
    left = [position for position in positions[_JUDGED:] if step.sites[position].phase is Phase.OPTIMIZER]
    yield from left[:_JUDGED]


def _key(step: Step, site: Site, cause: Cause) -> tuple[str, str]:
    """What may have one cause: generators, tensors of an optimizer, all that is initialised, all modules of a class."""
    if cause.reason == "batch":
        return cause.reason, site.fqn
    if cause.reason in {"module", "own_code", "op", "buffer"}:
        name = cause.module or site.fqn
        classes = [tree[name].module_class for tree in step.modules if name in tree]
        return "module", classes[0] if classes else name
    return cause.reason, ""


def _has_effect(step: Step, position: int, cause: Cause) -> bool:
    """Whether the origin made something else differ, or there is a cause on record: else it may follow from another.

    A generator that differs moves no number until something draws from it. An optimizer may compute with the gradients
    of all parameters, so an equal one of its own says little.
    """
    if cause.reason == "rng":
        return is_drawn_from(step, position)
    return cause.reason != "optimizer" or bool(hyperparameter_changes(step.table, step.standing))


def shown_by(step: Step, resumption: Resumption | None) -> dict[int, Cause]:
    """The divergences of the step at which a run goes on that show what it did not restore, one for each part."""
    if resumption is None or not step.comparison.goes_on_at(step.number):
        return {}
    by_position = {}
    for part in resumption.lost:
        those = [position for position, site in enumerate(step.sites) if shows(site, part)]
        those.sort(key=lambda position: step.sites[position].path != "['step']")  # a count says most
        if those:
            by_position[those[0]] = Cause(Role.ORIGIN, "resumed")
    return by_position


def shows(site: Site, part: Part) -> bool:
    """Whether a record holds a part of what a resumed run goes on with."""
    if site.kind is Kind.RNG:
        return site.phase is Phase.START and part.generator == generator_of(site)
    if site.kind is Kind.BATCH:
        return part.part == PLACE
    return site.kind is Kind.OPTIMIZER_STATE and part.part == site.kind.several
