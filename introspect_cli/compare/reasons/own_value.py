"""A value that the script records itself differs, though nothing recorded before it does: the code that computes it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from introspect_cli.compare.reasons.base import Cause, Reason, Scene
from introspect_cli.compare.reasons.evidence import all_before, although
from introspect_cli.compare.reasons.words import apart, both_values, scaled, what
from introspect_cli.records import Kind

if TYPE_CHECKING:
    from introspect_cli.compare.reasons.facts import Facts


class OwnValue(Reason):
    """What was given to `introspect_cli.record`."""

    word = "value"
    place = "the script's code that computes this value"
    kinds = frozenset({Kind.VALUE})
    priority = 40

    def applies(self, facts: Facts, position: int) -> Cause | None:
        """It may come from everything before it."""
        known = all_before(facts, float(facts.items.order[position]))
        return None if known is None else self.cause(*known)

    def sentence(self, scene: Scene) -> str:
        """Both values of a number, and where to look."""
        first = scene.first
        text = f"{what(first.site)} differs{both_values(first) or apart(first)}{although(scene.cause.evidence)}"
        return (
            f"{text}{scaled(first)}. The cause is in the script's code that computes it, or in what it was computed "
            f"from and is not recorded.{scene.rounding_words()}"
        )


REASONS = (OwnValue(),)
