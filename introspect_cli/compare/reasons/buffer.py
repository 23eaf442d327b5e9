"""A buffer differs after the step, though its module's inputs do not: how the module updates it."""

from __future__ import annotations

import re

from introspect_cli.compare.reasons.base import Cause, Reason, Scene
from introspect_cli.compare.reasons.evidence import Evidence, although, known_of, value_before
from introspect_cli.compare.reasons.facts import FORWARD, Facts, owner_of
from introspect_cli.compare.reasons.module import attribute_changes
from introspect_cli.compare.reasons.step_view import untouched_side
from introspect_cli.compare.reasons.words import apart, what
from introspect_cli.records import Kind, Phase


class Buffer(Reason):
    """A buffer at the end of a step."""

    word = "buffer"
    place = "the way the module updates it"
    kinds = frozenset({Kind.BUFFER})
    names = re.compile(r"momentum|ema|stat|norm", re.IGNORECASE)

    def applies(self, facts: Facts, position: int) -> Cause | None:
        """It comes from the inputs of its module and its value before."""
        site, order = facts.sites[position], float(facts.items.order[position])
        owner = owner_of(site.fqn)
        if site.phase is Phase.START or site.fqn in facts.carried.buffers:
            return None
        if facts.differing(Kind.INPUT, owner) or facts.differing(Kind.BUFFER, site.fqn)[:1] != [position]:
            return None
        unions = facts.unions(Kind.INPUT, FORWARD, owner)
        seen = any(facts.state[unions])
        if not seen and facts.before(order, FORWARD):
            return None
        needed = seen or Kind.INPUT not in facts.kinds
        inputs = [Evidence(f"the inputs of {owner}", known_of(facts, unions), needed=needed)] if needed else []
        return self.cause(*inputs, value_before(facts, site, order), module=owner)

    def sentence(self, scene: Scene) -> str:
        """Whether it is updated in both runs."""
        text = f"{what(scene.site)} differs at the end of the step{apart(scene.first)}{although(scene.cause.evidence)}."
        side = untouched_side(scene.step, scene.before, scene.union)
        if side:
            return f"{text} It does not change in {side} (eval mode or frozen there)."
        changed = attribute_changes(scene, owner_of(scene.site.fqn))
        if changed:
            return f"{text} It is updated differently: its module has {'; '.join(changed[:3])}."
        return f"{text} It is updated differently (momentum, mode, or a different number of times)."


REASONS = (Buffer(),)
