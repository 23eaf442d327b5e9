"""A parameter or its optimizer state differs after the step, though what the step was given does not: the optimizer."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, ClassVar

from introspect_cli.compare.join.sites import KINDS
from introspect_cli.compare.reasons.base import Cause, Reason, Scene
from introspect_cli.compare.reasons.evidence import (
    PASSES,
    Evidence,
    Known,
    although,
    gradient_of,
    known_of,
    of,
    state_before,
    value_before,
)
from introspect_cli.compare.reasons.hyperparameters import changes_for, hyperparameter_changes, in_words
from introspect_cli.compare.reasons.step_view import StepRecords, untouched_side
from introspect_cli.compare.reasons.words import apart, what
from introspect_cli.records import Kind, Phase

if TYPE_CHECKING:
    from introspect_cli.compare.reasons.facts import Facts


class Optimizer(Reason):
    """What an optimizer step leaves."""

    word = "optimizer"
    place = "the optimizer or its hyper-parameters"
    kinds = frozenset({Kind.PARAM, Kind.OPTIMIZER_STATE})
    weights: ClassVar = {"hyperparameter": 1.0, "optimizers": 0.98}
    names = re.compile(r"lr|learning|beta|momentum|decay|eps|optim|warm|sched|fused|foreach|amsgrad", re.IGNORECASE)

    def applies(self, facts: Facts, position: int) -> Cause | None:
        """It comes from the gradient, the value and the optimizer's state before."""
        site, order = facts.sites[position], float(facts.items.order[position])
        if site.phase is Phase.START:
            return None
        carried = facts.carried
        fed = site.fqn in carried.params or any(name == site.fqn for name, _ in carried.states)
        seen = not site.call and bool(facts.recorded(Phase.OPTIMIZER, Kind.GRAD, site.fqn, 0))
        fed = fed or (bool(facts.differing(Kind.GRAD, site.fqn)) if seen else facts.before(order, PASSES))
        earlier = any(
            facts.items.order[i] < order and (facts.sites[i].phase is Phase.START or facts.sites[i].call)
            for i in facts.differing(Kind.PARAM, site.fqn)
        )
        if fed or earlier:
            return None
        before = state_before(facts, site)
        if site.kind is Kind.PARAM:
            before = [value_before(facts, site, order), *(found for found in before if found.known is Known.WITHIN)]
        if site.call:
            known = known_of(facts, facts.unions(Kind.GRAD, frozenset({Phase.OPTIMIZER})), order)
            return self.cause(*before, Evidence("the gradients before it in the optimizer step", known))
        gradient = gradient_of(facts, site.fqn)
        if gradient.known is Known.UNSEEN and hyperparameter_changes(
            facts.alignment, StepRecords(facts.alignment, facts.pair)
        ):
            gradient = Evidence(gradient.name, gradient.known, plural=False)  # a cause is on record all the same
        return self.cause(gradient, *before)

    def sentence(self, scene: Scene) -> str:
        """Which optimizer, and how it was set up differently."""
        first = scene.first
        call = first.site.call
        when = f"within the optimizer step, before its forward pass {call}" if call else "after the optimizer step"
        text = f"{what(first.site)} differs {when}{apart(first)}{although(scene.cause.evidence)}."
        a, b = scene.optimizers
        name = ", ".join(a) if a and a == b else "the optimizer"
        if a and b and a != b:
            return f"{text} The optimizer is {', '.join(a)} in a and {', '.join(b)} in b."
        side = untouched_side(scene.step, scene.before, scene.union)
        if side:
            return f"{text} In {side}, {name} leaves this parameter as it was (not among its parameters, or lr 0)."
        side, counts = _fresh_state(scene.step, first.site.fqn)
        if side:
            return f"{text} The optimizer state of {side} started afresh ({counts})."
        found = changes(scene)
        told = in_words(found)
        if not found and any(taken.known is Known.WITHIN for taken in scene.cause.evidence):
            return f"{text} {_amplified(name)}"
        if call and of(scene.cause.evidence, Known.UNSEEN):
            return f"{text} The cause is {name}, its hyper-parameters{told}, or the gradients it computed (zero_grad)."
        return f"{text} The cause is {name} or its hyper-parameters{told}."


def _amplified(name: str) -> str:
    """That the optimizer made a tolerated difference larger, where its hyper-parameters are equal."""
    text = f"The suspect is a small difference in what went in, amplified by {name}"
    if re.match(r"(N?R?Adam|RMSprop|Ada|Lion|Sign|Rprop|LAMB|SparseAdam)", name, re.IGNORECASE):
        text += ", which divides a gradient by its size (in the first step only its sign is left)"
    return f"{text}."


def changes(scene: Scene) -> dict[str, tuple[str | None, str | None]]:
    """Hyper-parameters that differ and apply to the diverging parameter: by settings, and as recorded at the step."""
    settings = scene.run_a.settings.get("optimizers"), scene.run_b.settings.get("optimizers")
    told = changes_for(*settings, scene.site.fqn)
    others = {
        name: both
        for name, both in scene.hyperparameters.items()
        if name.partition(" (")[0] not in told and not (told and None in both)
    }
    return told | others


def _fresh_state(step: StepRecords, fqn: str) -> tuple[str, str]:
    """The side whose optimizer counts fewer steps for a parameter, and both counts in words."""
    alignment = step.alignment
    for union in alignment.by_fqn.get(fqn, []):
        if KINDS[alignment.kind[union]] is Kind.OPTIMIZER_STATE and "step" in alignment.path[union]:
            one, two = step.plain(union, "a"), step.plain(union, "b")
            try:
                counts = float(one or "nan"), float(two or "nan")
            except ValueError:
                return "", ""
            if None not in (one, two) and counts[0] != counts[1] and 1.0 in counts:
                return ("a" if counts[0] == 1.0 else "b"), f"it has counted {one} steps in a and {two} in b"
    return "", ""


REASONS = (Optimizer(),)
