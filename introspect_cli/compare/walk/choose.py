"""The sixth pass, and which of a step's divergences is the first: a value, or the cause that it follows from.

A random state that differs moves no number until somebody draws from it, and a module that only one run has may change
nothing. So records are told apart: values that both runs have are effects, and decide whether the runs diverge. Random
states, and what one run only has because the other has nothing of that name, are causes: they are blamed where an
effect differs and does not explain itself, and told as structure where none does.

A step may diverge in several places that have nothing to do with one another: another seed and another learning rate,
two branches of a model. Who mends the first alone finds the next tomorrow. So every divergence that rests on nothing
that differs is told with its cause; where many have one cause (the parameters of one optimizer), the first of them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from introspect_cli.compare.reasons.judge import judge
from introspect_cli.compare.reasons.structure import drawn
from introspect_cli.compare.resumed.began import Carried
from introspect_cli.compare.resumed.parts import PLACE
from introspect_cli.compare.settings.hyperparameters import hyperparameter_changes
from introspect_cli.compare.step.step import Step
from introspect_cli.compare.terms.evidence import Cause, Known
from introspect_cli.compare.terms.names import generator_of
from introspect_cli.compare.terms.result import Role
from introspect_cli.compare.terms.sites import kind_code, phase_code
from introspect_cli.compare.terms.table import EQUAL, WITHIN
from introspect_cli.records import Kind, Phase, Site

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from introspect_cli.compare.step.comparison import Comparison
    from introspect_cli.compare.step.structure import Structure
    from introspect_cli.compare.terms.findings import Part, Resumption
    from introspect_cli.compare.terms.table import Table

_FLOWING_BACK = (Kind.GRAD_INPUT, Kind.GRAD_OUTPUT)

_AT_ITS_PLACE = frozenset({"batch", "optimizer", "module", "op"})
"""Reasons that say of a record that all that went into it is equal, so that nothing elsewhere is to blame."""

_AFTER_LOSS = frozenset({Phase.BACKWARD, Phase.OPTIMIZER})
_OUTSIDE = frozenset({Phase.START, Phase.DATA, Phase.LOSS})
"""Phases whose values code outside of modules makes: its draws are not on record."""


def separate(table: Table, comparison: Comparison) -> Table:
    """The table with a mark on random states, and on what one run alone has since the other has no such thing."""
    if comparison.causes is None:
        return table
    random, alone = (mask[table.site] for mask in comparison.causes)
    return replace(table, cause=table.diverging & (random | (table.one_sided & alone)))


class Lead(NamedTuple):
    """The record that the answer begins with; it may lie in an earlier step.

    Attributes:
        stands_for: which divergence of the step at hand it is; None where it is one of another step.
    """

    step: Step
    position: int
    stands_for: int | None


def choose(
    step: Step, positions: Sequence[int], earlier: Structure, began: Table | None, *, new_values: bool
) -> Lead | None:
    """The divergence that leads the answer; None for the earliest of the step.

    That is the earliest value, unless a cause stands before it, in the step or in those in which nothing but causes
    differed: something of one run alone that brings a value which the other lacks, or lets a gradient flow, or a random
    state that something was drawn from.

    Args:
        step: the first step in which a value diverges.
        positions: those of its divergences that were selected, in order.
        earlier: what differed in structure in the steps before.
        began: the first step in which nothing but causes differed; None where there is none.
        new_values: whether one of these causes brought a value that the other run has nowhere.
    """
    table, divergences = step.table, step.divergences
    effect = next((place for place in positions if not divergences.cause[place]), None)
    if effect is None or (effect == positions[0] and began is None):
        return None
    site, before = step.sites[effect], [step.sites[position] for position in positions[: positions.index(effect)]]
    harmless = not (step.is_one_sided(effect) or new_values or brings_values(table.keeping(table.cause)))
    harmless = harmless and not (site.phase in _AFTER_LOSS and _flows_in_one(step, before))
    if harmless and not _was_drawn_from(step, site, before, earlier):
        alone = step.with_table(table.keeping(~(table.cause & table.one_sided)))
        return Lead(alone, alone.sites.index(site), effect)
    if began is not None:
        first = Step(step.comparison, began, Carried())
        return Lead(first, drawn(first) or 0, None)
    if step.sites[positions[0]].kind is not Kind.RNG:
        return None
    # where random states differ, a parameter that one run alone drew is to blame, else what is drawn from
    blamed = drawn(step)
    if blamed is None:
        blamed = next((position for position in positions if is_drawn_from(step, position)), None)
    return Lead(step, blamed, blamed) if blamed is not None and blamed in positions else None


def _flows_in_one(step: Step, before: Iterable[Site]) -> bool:
    """Whether a gradient reaches a module that both have in one run alone: others that it is added to differ."""
    return any(site.kind in _FLOWING_BACK and all(site.fqn in tree for tree in step.modules) for site in before)


def _was_drawn_from(step: Step, effect: Site, before: Iterable[Site], earlier: Structure) -> bool:
    """Whether a random state differs before a value, and something may have been drawn from it by then."""
    if not (earlier.random or any(site.kind is Kind.RNG for site in before)):
        return False
    draws = any(site.kind is Kind.RNG and site.phase is not Phase.START for site in step.sites)
    by_script = effect.phase in _OUTSIDE or (effect.kind is Kind.INPUT and "." not in effect.fqn)
    return draws or by_script or not step.comparison.notices_all_draws


def is_drawn_from(step: Step, position: int) -> bool:
    """Whether a divergence is the state of a generator from which something then draws other numbers."""
    site = step.sites[position]
    if site.kind is not Kind.RNG or site.phase is not Phase.START:
        return False
    return any(
        other.kind is Kind.RNG and other.phase is not Phase.START and generator_of(other) == generator_of(site)
        for other in step.sites
    )


def brings_values(causes: Table) -> bool:
    """Whether something that one run only has brings a value into the forward pass that the other has nowhere.

    A wrapper gives what is inside it, and an identity what it is given: neither can be to blame.
    """
    alignment = causes.alignment
    giving = [kind_code(kind) for kind in (Kind.OUTPUT, Kind.OP_OUTPUT, Kind.PARAM, Kind.BUFFER)]
    late = [phase_code(phase) for phase in (Phase.BACKWARD, Phase.OPTIMIZER)]
    for half, other in zip(causes.halves, (causes.b, causes.a), strict=True):
        early = half.only[~np.isin(alignment.phase[half.sites[half.only]], late)]
        sites, kinds = half.sites[early], alignment.kind[half.sites[early]]
        gives = half.batch.checksum[early[np.isin(kinds, giving)]]
        agree = np.isin(causes.state, (EQUAL, WITHIN)) & ~causes.one_sided  # parts of a batch have another checksum
        known = half.batch.checksum[(causes.row_a if half.side == "a" else causes.row_b)[agree]]
        if not (np.isin(gives, other.checksum) | np.isin(gives, known)).all():
            return True
        given, gave = (
            {alignment.fqn[site] for site in sites[kinds == kind_code(kind)].tolist()}
            for kind in (Kind.INPUT, Kind.OUTPUT)
        )
        if given - gave:
            return True  # what it gave was not seen
    return False


# --- the other origins of the step

_JUDGED = 300
"""Divergences that are looked at, from the first on and of what the optimizers leave: nearly all follow from others."""

_MOST = 8

_STANDS_ALONE = _AT_ITS_PLACE | {"rng", "initial", "outside", "own_code", "buffer"}
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
        if other.role is not Role.ORIGIN or other.reason not in _STANDS_ALONE or key in seen:
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
