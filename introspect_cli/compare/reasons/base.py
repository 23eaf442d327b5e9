"""What a reason is: when it applies, what it rests on, its sentence, and which settings explain it.

A record that differs is an origin where everything that went into it was seen and does not differ. Each reason knows
what goes into the records it is about, and hands that over as evidence; `judge` alone decides what follows from it, so
that no reason can take what was not recorded for equal. A reason is a class with a word in a file of this folder; a
new file needs no entry anywhere.
"""

from __future__ import annotations

import importlib
import pkgutil
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, ClassVar

from introspect_cli.compare import reasons as folder
from introspect_cli.compare.step.rests_on import RESTS_ON, Place, rests_on
from introspect_cli.compare.terms.evidence import Cause, Evidence, Known, those
from introspect_cli.compare.terms.result import Role

if TYPE_CHECKING:
    import re
    from collections.abc import Mapping

    from introspect_cli.compare.reasons.scene import Scene
    from introspect_cli.compare.step.step import Step
    from introspect_cli.records import Kind

KERNEL_WEIGHTS = {"runtime": 0.75, "packages": 0.6, "hardware": 0.55}
"""How well settings explain what a kernel computes."""


class Reason:
    """A reason that a record can differ for; the docstring of each is what the reference says of it.

    Attributes:
        word: its name in `--format json`.
        place: where the cause lies, in words: `the loss code`.
        kinds: kinds of the records it is about; empty for all.
        priority: of several that could apply, the smallest is asked first.
        weights: how well a setting explains it, 0 to 1, by the setting's source.
        names: settings whose names match explain it a little better.
    """

    word: str = ""
    place: str = ""
    kinds: frozenset[Kind] = frozenset()
    priority: int = 50
    weights: ClassVar[Mapping[str, float]] = {}
    names: re.Pattern[str] | None = None

    def applies(self, step: Step, position: int) -> Cause | None:
        """What makes a divergence one, resting on evidence; None where something that went into it differs."""
        if self.is_fed(step, position):
            return None
        return self.cause(*self.rests_on(step, position))

    def rests_on(self, step: Step, position: int) -> list[Evidence]:
        """What is known of all that a divergence rests on."""
        return rests_on(step, Place(step.sites[position], step.order_at(position)), RESTS_ON[self.word])

    def is_fed(self, step: Step, position: int) -> bool:
        """Whether something that may have gone into a divergence differs: here, anything before it in the step."""
        return step.anything_before(step.order_at(position)) or step.rng_differs()

    def where(self, module: str = "", scene: Scene | None = None) -> str:
        """`place`, where another module than the record's is blamed, without what a scene's records exclude."""
        del module, scene
        return self.place

    def sentence(self, scene: Scene) -> str:
        """What follows `First divergence at step 3: `."""
        raise NotImplementedError

    def evidence(self, scene: Scene) -> list[str]:
        """Lines under the sentence beside those of the cause's evidence."""
        del scene
        return []

    def cause(self, *evidence: Evidence, role: Role = Role.ORIGIN, **where: str) -> Cause:
        """This reason as a cause."""
        return Cause(role, self.word, evidence, **where)


@cache
def reasons() -> tuple[Reason, ...]:
    """All reasons there are, in the order in which they are asked."""
    every: list[Reason] = []
    for module in pkgutil.iter_modules(folder.__path__, folder.__name__ + "."):
        names = vars(importlib.import_module(module.name)).values()
        classes = [one for one in names if isinstance(one, type) and issubclass(one, Reason) and one.word]
        every += [one() for one in classes if one.__module__ == module.name]
    return tuple(sorted(every, key=lambda reason: (reason.priority, reason.word)))


@cache
def _about(kind: Kind) -> tuple[Reason, ...]:
    return tuple(reason for reason in reasons() if not reason.kinds or kind in reason.kinds)


@cache
def reason_named(word: str) -> Reason:
    """The reason of a cause."""
    return next(reason for reason in reasons() if reason.word == word)


def judge(step: Step, position: int) -> Cause:
    """Role and reason of one divergence of a step."""
    gap: Cause | None = None
    for reason in _about(step.sites[position].kind):
        if gap is not None and reason.priority < 90:
            continue
        cause = reason.applies(step, position)
        if cause is None or those(cause.evidence, Known.DIFFERS):
            continue
        if cause.role is Role.ORIGIN and any(fact.needed for fact in those(cause.evidence, Known.UNSEEN)):
            gap = replace(cause, role=Role.PROPAGATED, reason="gap", instead=reason.word)
            if gap.module not in {"", step.sites[position].fqn}:
                gap = replace(gap, evidence=tuple(replace(fact, inside=gap.module) for fact in gap.evidence))
            continue
        if gap is None or reason.word == "resumed":
            return cause
        return gap
    raise AssertionError(step.sites[position])  # `propagated` always applies
