"""A script of plain tensors: its loss or a gradient differs, though the tensors that it trains do not.

No module runs in it, so nothing between these tensors and the loss is on record. The sentence says so, and blames
neither loss code nor clipping for what may be any operation of the script's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from introspect_cli.compare.reasons.base import Cause, Reason, Scene
from introspect_cli.compare.reasons.evidence import although, batches, is_random, loss_of, random_state, trained_before
from introspect_cli.compare.reasons.gradient import stale_side
from introspect_cli.compare.reasons.words import apart, both_values, scaled, what
from introspect_cli.records import Kind, Phase

if TYPE_CHECKING:
    from introspect_cli.compare.reasons.facts import Facts

_UNSEEN = "No module is called in these runs, so no operation between these tensors and the loss was recorded"


class Plain(Reason):
    """The loss, or a gradient, of a script in which no module runs."""

    word = "plain"
    place = "the script's own operations"
    kinds = frozenset({Kind.LOSS, Kind.GRAD})
    priority = 45

    def applies(self, facts: Facts, position: int) -> Cause | None:
        """It comes from the tensors that are trained, the data and the script's operations."""
        site, order = facts.sites[position], float(facts.items.order[position])
        if not facts.without_modules or facts.rng_differs() or facts.anything_before(order):
            return None
        losses = loss_of(facts) if site.kind is Kind.GRAD else []
        given = batches(facts, order)
        seen = [given] if facts.unions(Kind.BATCH, frozenset({Phase.DATA})).size else []
        return self.cause(*losses, trained_before(facts, order), *seen, random_state(facts))

    def sentence(self, scene: Scene) -> str:
        """What is not known, and how to know it."""
        first = scene.first
        taken = [found for found in scene.cause.evidence if not is_random(found)]
        text = f"{what(first.site)} differs{both_values(first) or apart(first)}{although(taken)}{scaled(first)}."
        side = stale_side(scene.facts, scene.position) if first.site.kind is Kind.GRAD else ""
        if side:
            return (
                f"{text} In {side} it is the other run's gradient plus that of the step before: it was not set to "
                f"zero in {side}."
            )
        if first.site.kind is Kind.GRAD:
            return f"{text} {_UNSEEN}: the cause is in their backward passes, or in what was done to the gradient."
        return f"{text} {_UNSEEN}: the cause is there, or in the data (capture --level op records every operator)."


REASONS = (Plain(),)
