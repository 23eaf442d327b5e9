"""An operator's result differs, though nothing recorded before it does."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import numpy as np

from introspect_cli.compare.reasons.base import Cause, Reason, Scene
from introspect_cli.compare.reasons.evidence import Evidence, although, known_of, random_state
from introspect_cli.compare.reasons.memory_format import memory_formats
from introspect_cli.compare.reasons.module import WEIGHTS
from introspect_cli.compare.reasons.nondeterministic import nondeterministic
from introspect_cli.compare.reasons.words import apart, scaled, what
from introspect_cli.records import Kind, Phase

if TYPE_CHECKING:
    from introspect_cli.compare.reasons.facts import Facts


class Operator(Reason):
    """The result of one operator."""

    word = "op"
    place = "this operator"
    kinds = frozenset({Kind.OP_OUTPUT})
    weights: ClassVar = WEIGHTS

    def applies(self, facts: Facts, position: int) -> Cause | None:
        """It comes from everything before it in the step."""
        order = float(facts.items.order[position])
        if facts.anything_before(order) or facts.rng_differs():
            return None
        earlier = np.flatnonzero(facts.state * (facts.order < order))
        known = known_of(facts, earlier)
        return self.cause(Evidence("everything recorded before it", known, plural=False), random_state(facts))

    def sentence(self, scene: Scene) -> str:
        """Where in the user's code it ran."""
        first = scene.first
        line = f", run at {first.source}," if first.source else ""
        text = f"{what(first.site)}{line} differs{apart(first)}{although(scene.cause.evidence[:1])}{scaled(first)}."
        text += nondeterministic(first)
        if first.site.phase is Phase.BACKWARD:
            return (
                f"{text} This gradient is computed in a different way, or its forward operator has different options."
            )
        formats = memory_formats(scene)
        told = f"; {' and '.join(formats[:2])}, which may choose another kernel" if formats else ""
        return f"{text} The operator has different options or a different kernel{told}.{scene.rounding_words()}"


REASONS = (Operator(),)
