"""The loss differs, though every module output and every batch before it does not: the loss code or the targets."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from introspect_cli.compare.reasons.base import Cause, Reason, Scene
from introspect_cli.compare.reasons.evidence import Known, although, batches, outputs_before, random_state
from introspect_cli.compare.reasons.words import apart, both_values, often, scaled, what
from introspect_cli.records import Kind, Phase

if TYPE_CHECKING:
    from introspect_cli.compare.reasons.facts import Facts

_UPSTREAM = frozenset({Phase.DATA, Phase.FORWARD, Phase.EVAL})


class Loss(Reason):
    """What backward is called on."""

    word = "loss"
    place = "the loss code or the targets"
    kinds = frozenset({Kind.LOSS})
    names = re.compile(r"loss|smooth|reduc|label|ignore|pad|accum|scale", re.IGNORECASE)

    def applies(self, facts: Facts, position: int) -> Cause | None:
        """It comes from module outputs and batches."""
        order = float(facts.items.order[position])
        if facts.before(order, _UPSTREAM) or facts.rng_differs() or facts.carried.params:
            return None
        return self.cause(outputs_before(facts, order), batches(facts, order), random_state(facts))

    def sentence(self, scene: Scene) -> str:
        """The values, and what could have made them."""
        first = scene.first
        outputs, seen, _ = scene.cause.evidence
        text = (
            f"{what(first.site)} differs{both_values(first) or apart(first)}{although([outputs, seen])}{scaled(first)}"
        )
        if scene.calls:
            name, one, two = scene.calls
            text += f"; {name} runs {often(one)} in this step of a and {often(two)} in b"
        targets = "" if seen.known in {Known.EQUAL, Known.WITHIN} else " or the targets"
        return f"{text}. The cause is in the loss code (reduction, mask, weighting, scale){targets}."


REASONS = (Loss(),)
