"""What the script saves: a tensor in a checkpoint that differs, or that one run's checkpoint lacks."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from introspect_cli.compare.reasons.base import Reason
from introspect_cli.compare.reasons.words import although, apart, what
from introspect_cli.compare.rests_on import RESTS_ON, Place, rests_on
from introspect_cli.records import Kind

if TYPE_CHECKING:
    from introspect_cli.compare.evidence import Cause
    from introspect_cli.compare.reasons.scene import Scene
    from introspect_cli.compare.step import Step


class Product(Reason):
    """A tensor in a file that both runs save."""

    word = "product"
    meaning = "A file that the script saves holds another value although what it was computed from is equal."
    place = "the script's code that computes what is saved"
    kinds = frozenset({Kind.PRODUCT})
    priority = 20
    names = re.compile(r"ema|average|swa|momentum|decay|save|checkpoint|half|precision", re.IGNORECASE)

    def applies(self, step: Step, position: int) -> Cause | None:
        """It is made of what is trained, and nothing but what is saved differs."""
        if step.rng_differs() or step.carried.diverged or any(site.kind is not Kind.PRODUCT for site in step.sites):
            return None
        place = Place(step.sites[position], step.order_at(position))
        return self.cause(*rests_on(step, place, RESTS_ON[self.word]))

    def sentence(self, scene: Scene) -> str:
        """That it differs, or is in one run's file alone, and where to look."""
        first = scene.first
        if first.a is None or first.b is None:
            side, other = ("a", "b") if first.b is None else ("b", "a")
            return f"only {side} has {what(first.site)}: {other} saves the file without it."
        text = f"{what(first.site)} differs{apart(first)}{although(scene.cause.evidence)}"
        return (
            f"{text}. {scene.the_cause_is} in the script's code that computes what is saved (a moving average, a copy, "
            "a conversion)."
        )


REASONS = (Product(),)
