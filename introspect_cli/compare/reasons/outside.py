"""A parameter or buffer was changed, but by no optimizer step: loaded, copied, averaged, or updated by hand."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from introspect_cli.compare.join.sites import kind_code, phase_code
from introspect_cli.compare.reasons.base import Cause, Reason, Scene
from introspect_cli.compare.reasons.evidence import Known, answer
from introspect_cli.compare.reasons.initial import TENSORS, initial_tensors, one_sided
from introspect_cli.compare.reasons.structure import subject_of
from introspect_cli.compare.reasons.words import apart, what
from introspect_cli.records import SETTING_KINDS, Kind, Phase

if TYPE_CHECKING:
    from introspect_cli.compare.reasons.facts import Facts


class Outside(Reason):
    """A tensor that a step finds with another value than the step before left."""

    word = "outside"
    place = "a change outside of an optimizer step"
    kinds = TENSORS
    priority = 20

    def applies(self, facts: Facts, position: int) -> Cause | None:
        """The tensor was there before, and what the step before left of it is on record."""
        site = facts.sites[position]
        if site.phase is not Phase.START or not facts.was_there(site.fqn):
            return None
        if one_sided(facts, position):
            subject, role = subject_of(facts, position)
            return None if facts.gap else self.cause(role=role, subject=subject)
        if facts.rng_differs() or facts.carried.diverged or facts.gap:
            return None
        return self.cause()

    def sentence(self, scene: Scene) -> str:
        """In which run, and between which records."""
        first = scene.first
        differ, _ = initial_tensors(scene.facts)
        more = f"{differ - 1} more tensor{'s' * (differ > 2)}" if differ > 1 else ""
        step = f"step {first.step - 1}"
        if first.a is None or first.b is None:
            side = "a" if first.b is None else "b"
            were = f", as {'was' if differ == 2 else 'were'} {more}" if more else ""
            return (
                f"{what(first.site)} was changed outside of an optimizer step in {side} only{were}: when the step "
                f"begins it is not what {step} left (loading a checkpoint, copying, a moving average, in-place code)."
            )
        do = f", as {'does' if differ == 2 else 'do'} {more}" if more else ""
        text = f"{what(first.site)} differs when the step begins{apart(first)}{do}"
        if scene.union in scene.facts.pair.left:  # what the step before left is on record in one run alone
            return f"{text}: the update of {step} is different, or something changed it after{_gradient(scene, step)}."
        text += f", although {scene.all_before}: "
        if _by_hand(scene.facts):
            return (
                f"{text}no optimizer steps in these runs, so the script updates its parameters by hand after "
                f"the backward pass of {step}, {_rule(scene)}."
            )
        return (
            f"{text}it was changed outside of an optimizer step (loading a checkpoint, a moving average, "
            f"copying, in-place code) after {step} was recorded."
        )


def _rule(scene: Scene) -> str:
    """What of an update by hand may be different, given whether the gradient of the step before is on record."""
    facts = scene.facts
    gradients = facts.unions(Kind.GRAD, frozenset({Phase.BACKWARD}), scene.site.fqn)
    if facts.state_before is not None and answer(facts.state_before[gradients], every=True) is Known.EQUAL:
        return "with a different learning rate or rule (its gradient there is equal)"
    return "with a different gradient (clipping, scaling), learning rate or rule"


def _gradient(scene: Scene, step: str) -> str:
    """What is known of the gradient that the update before was made of; "" for nothing."""
    facts = scene.facts
    if facts.state_before is None:
        return ""
    gradients = facts.unions(Kind.GRAD, frozenset({Phase.BACKWARD, Phase.OPTIMIZER}), scene.site.fqn)
    equal = answer(facts.state_before[gradients], every=True) is Known.EQUAL
    return f"; its gradient in {step} is equal" if equal else ""


def _by_hand(facts: Facts) -> bool:
    """Whether no optimizer ever steps in either run; a lean capture records no more of a step than a parameter."""
    settings = np.isin(facts.alignment.kind, [kind_code(kind) for kind in SETTING_KINDS])
    return not (settings | (facts.alignment.phase == phase_code(Phase.OPTIMIZER))).any()


REASONS = (Outside(),)
