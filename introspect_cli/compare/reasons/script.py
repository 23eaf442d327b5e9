"""What a model is given differs, though nothing recorded before it does: the script's own preparation of the batch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from introspect_cli.compare.reasons.base import Cause, Reason, Scene
from introspect_cli.compare.reasons.evidence import (
    LEFT_OUT,
    Known,
    although,
    batches,
    calls_left_out,
    outputs_before,
    random_state,
)
from introspect_cli.compare.reasons.module import parent_call
from introspect_cli.compare.reasons.words import apart, both_values, scaled, what
from introspect_cli.records import Kind

if TYPE_CHECKING:
    from introspect_cli.compare.reasons.facts import Facts


class Script(Reason):
    """The input of a module that no other module called."""

    word = "script"
    place = "the script's code before this module"
    kinds = frozenset({Kind.INPUT})
    priority = 40

    def applies(self, facts: Facts, position: int) -> Cause | None:
        """It may come from everything that was computed before."""
        site, order = facts.sites[position], float(facts.items.order[position])
        if parent_call(facts, site.fqn, order) is not None or facts.anything_before(order):
            return None
        if calls_left_out(facts, site.fqn):
            return self.cause(batches(facts, order), random_state(facts), LEFT_OUT)
        before = outputs_before(facts, order)
        told = [before] if before.known in {Known.EQUAL, Known.WITHIN} else []
        return self.cause(batches(facts, order), random_state(facts), *told)

    def sentence(self, scene: Scene) -> str:
        """Whether a batch was seen to be equal, and whether modules ran before."""
        text = f"{what(scene.site)} differs{both_values(scene.first) or apart(scene.first)}"
        seen, _, *outputs = scene.cause.evidence
        if outputs:
            fed = [seen] if seen.known is not Known.UNSEEN else []
            given = "module outputs, the batch" if fed else "module outputs, data that no loader gave"
            return (
                f"{text}{although([*outputs, *fed])}{scaled(scene.first)}. The cause is in the "
                f"script's own code that computes it: from {given} or values of its own (targets, masks, weights)."
            )
        if seen.known is not Known.UNSEEN:
            known = "equal" if seen.known is Known.EQUAL else "within tolerance"
            return (
                f"{text} although the batch is {known}: the script changes something between the data loader and "
                f"{scene.site.fqn} (preprocessing, noise, masks, positions)."
            )
        return (
            f"{text} and is the first record of the step that does; no data loader was recorded, so the cause is the "
            "data pipeline or the script's own preparation of the batch."
        )


REASONS = (Script(),)
