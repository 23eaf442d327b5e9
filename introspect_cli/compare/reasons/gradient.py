"""A parameter's gradient differs when the optimizer sees it, though the backward pass does not: what was done to it."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from introspect_cli.compare.reasons.base import Cause, Reason, Scene
from introspect_cli.compare.reasons.evidence import (
    PASSES,
    Known,
    although,
    backward_before,
    forward_pass,
    is_random,
    loss_of,
    of,
    random_state,
)
from introspect_cli.compare.reasons.facts import owner_of
from introspect_cli.compare.reasons.module import attribute_changes
from introspect_cli.compare.reasons.ranks import differing_gradients, reduction_words, summed
from introspect_cli.compare.reasons.step_view import StepRecords
from introspect_cli.compare.reasons.words import apart, scaled
from introspect_cli.records import Kind, Phase, count

if TYPE_CHECKING:
    from introspect_cli.compare.reasons.facts import Facts


_NO_MULTIPLE = 1e-2


class Gradient(Reason):
    """A gradient as an optimizer step finds it."""

    word = "gradient"
    place = "clipping, unscaling, accumulation, zero_grad or a change of the gradient by hand"
    kinds = frozenset({Kind.GRAD})
    weights: ClassVar = {"hyperparameter": 0.3, "optimizers": 0.3}
    names = re.compile(r"clip|accum|scale|zero|norm|amp|micro", re.IGNORECASE)

    def applies(self, facts: Facts, position: int) -> Cause | None:
        """It comes from the forward pass, the loss and the backward pass of the step."""
        site, order = facts.sites[position], float(facts.items.order[position])
        upstream = (
            facts.before(order, PASSES)
            or facts.rng_differs()
            or facts.carried.params
            or facts.before(order, frozenset({Phase.START}))
        )
        if upstream or not site.fqn:
            return None
        backward = backward_before(facts, order, "the backward pass")
        passes = [forward_pass(facts), *loss_of(facts), backward, random_state(facts)]
        if of(passes, Known.UNSEEN) and stale_side(facts, position):
            passes = [replace(found, needed=False) for found in passes]  # the values alone tell the cause
        return self.cause(*passes)

    def sentence(self, scene: Scene) -> str:
        """What was done to it, where the values tell."""
        first = scene.first
        reduced = summed(scene)
        if reduced:
            return reduced
        when = f", in evaluation {first.site.call} of the optimizer's closure" if first.site.call else ""
        seen = f", as the optimizer sees it{when}," if first.site.phase is Phase.OPTIMIZER else ""
        text = f"the gradient of {first.site.fqn}{seen} differs{apart(first)}"
        text += although([found for found in scene.cause.evidence if not is_random(found)])
        side = stale_side(scene.facts, scene.position)
        if side:
            before = "evaluation" if first.site.call else "step"
            return (
                f"{text}. In {side} it is the other run's gradient plus that of the {before} before: zero_grad is "
                f"missing or late in {side}."
            )
        own = _own_backward(scene)
        if first.scale is not None:
            words = reduction_words(scene)
            if words:
                factor = f"b is {first.scale:.6g} x a: {words}"
                return f"{text}; {factor}. The cause is averaging over ranks or batches, clipping or unscaling."
            text += scaled(first)
            alone = no_multiples(scene)
            if alone:
                place = f"its reduction over the ranks, {self.place}" if scene.run_b.world_size > 1 else self.place
                more = f" and {count(len(alone) - 1, 'more')}" if len(alone) > 1 else ""
                return (
                    f"{text}, as clipping by a norm of all gradients makes it where another one changes; that of "
                    f"{alone[0]}{more} is no such multiple. The likely cause is what is done to that: {place}."
                )
            last = own or ", or their order"
            return f"{text}. The cause is clipping, unscaling, averaging over accumulated batches{last}."
        place = self.place.replace(" or ", ", ", 1) if own else self.place
        if max(scene.run_a.world_size, scene.run_b.world_size) > 1:
            place = f"its reduction over the ranks, {place}"
        return f"{text}. The cause is {place}{own}.{scene.rounding_words()}"

    def evidence(self, scene: Scene) -> list[str]:
        """How many gradients differ."""
        differ, recorded = differing_gradients(scene)
        told = [f"{differ} of {recorded} gradients differ in this step."]
        words = reduction_words(scene) if summed(scene) else ""
        return [f"b is {scene.first.scale:.6g} x a: {words}.", *told] if words else told


def no_multiples(scene: Scene) -> list[str]:
    """Parameters whose gradients differ in the step of the first, but not by its factor, in order; few of all, or none.

    One norm clips all gradients by one factor: those changed before it show.
    """
    facts, first = scene.facts, scene.first
    differ, recorded = differing_gradients(scene)
    if first.scale is None or differ < recorded:
        return []
    step = StepRecords(facts.alignment, facts.pair)
    found, multiples = [], 0
    for site, union in zip(facts.sites, facts.items.union.tolist(), strict=True):
        if (site.kind, site.phase, site.call) != (Kind.GRAD, scene.site.phase, scene.site.call):
            continue
        a, b = step.sketch(union, "a"), step.sketch(union, "b")
        if a is None or b is None or not (np.isfinite(a).all() and np.isfinite(b).all()):
            return []
        rest = float(np.linalg.norm(b - first.scale * a))
        if rest > _NO_MULTIPLE * float(np.linalg.norm(b)):
            found.append(site.fqn)
        else:
            multiples += 1
    return found if len(found) < multiples else []


def _own_backward(scene: Scene) -> str:
    """That the code of the parameter's own module may compute another gradient for it, as the end of a list.

    No hook sees that gradient before the optimizer does. What is done to gradients is done to all of them, as a rule.
    """
    owner = owner_of(scene.site.fqn)
    changed = attribute_changes(scene, owner)
    differ, recorded = differing_gradients(scene)
    if not owner or (differ == recorded and not changed):
        return ""
    how = f" ({'; '.join(changed[:3])})" if changed else ""
    return f", or how {owner} itself uses the parameter{how}"


def stale_side(facts: Facts, position: int) -> str:
    """The side whose gradient is the other's plus that of the step before, by the sketches' linearity."""
    site, union = facts.sites[position], int(facts.items.union[position])
    step = StepRecords(facts.alignment, facts.pair)
    if site.call:  # an optimizer that evaluates the model several times a step
        earlier = facts.recorded(site.phase, Kind.GRAD, site.fqn, site.call - 1)
        old = step.sketch(earlier[0], "a") if earlier else None
    else:
        old = None
        if facts.before_pair is not None:
            old = StepRecords(facts.alignment, facts.before_pair).sketch(union, "a")
    a, b = step.sketch(union, "a"), step.sketch(union, "b")
    if a is None or b is None or old is None or not np.linalg.norm(old) > 0:
        return ""
    if _is_mix(b, a, old):
        return "b"
    return "a" if _is_mix(a, b, old) else ""


def _is_mix(mixed: Any, fresh: Any, old: Any) -> bool:
    """Whether a sketch is a positive mix of two others; clipping rescales the whole, so the weights are free."""
    basis = np.stack([fresh, old], axis=1)
    if not (np.isfinite(basis).all() and np.isfinite(mixed).all()):
        return False
    if np.linalg.matrix_rank(basis, tol=1e-6 * float(np.linalg.norm(basis))) < 2:
        return False
    weights = np.linalg.lstsq(basis, mixed, rcond=None)[0]
    rest = float(np.linalg.norm(basis @ weights - mixed)) / max(float(np.linalg.norm(mixed)), 1e-300)
    return rest < 1e-5 and min(weights) > 1e-2 * max(weights)


REASONS = (Gradient(),)
