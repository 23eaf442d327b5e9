"""A random state differs first: another seed, or another number of draws; and generators that nobody seeded.

An unseeded generator starts from the operating system's entropy and differs between any two processes. Until somebody
draws from it, a capture records it as untouched, in words instead of a state; so it shows in the step after.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from introspect_cli.compare.join.sites import kind_code
from introspect_cli.compare.reasons.base import Cause, Reason, Scene
from introspect_cli.compare.reasons.step_view import StepRecords
from introspect_cli.compare.reasons.words import what
from introspect_cli.records import Kind, Status

if TYPE_CHECKING:
    from collections.abc import Callable

    from introspect_cli.compare.join.rows import StepPair
    from introspect_cli.compare.join.sites import Alignment
    from introspect_cli.compare.reasons.facts import Facts

_GENERATORS = {"python": "python's random", "numpy": "numpy.random"}


class RandomState(Reason):
    """The state of a random generator when a step begins."""

    word = "rng"
    place = "a random draw"
    kinds = frozenset({Kind.RNG})
    weights: ClassVar = {"sources": 0.7, "command": 0.9, "seeds": 1.0, "options": 0.95}
    names = re.compile(r"seed|worker|shuffle", re.IGNORECASE)

    def applies(self, facts: Facts, position: int) -> Cause | None:
        """A state comes from the same generator's state before."""
        return None if facts.sites[position].fqn in facts.carried.rng else self.cause()

    def sentence(self, scene: Scene) -> str:
        """When the draws must have differed."""
        site = scene.site
        if scene.is_first_step and _goes_on(scene):
            return (
                f"{what(site)} differs when the later run begins: resuming did not restore it, or the script drew from "
                "it before the first step."
            )
        if scene.is_first_step:
            return (
                f"{what(site)} differs already when the first captured step begins: a different seed (or none), or a "
                "different number of random draws before it."
            )
        if site.fqn in unseeded(scene):
            return f"{what(site)} differs when the step begins, although all values recorded before are equal."
        since = "since the last recorded step" if scene.facts.gap else f"during step {scene.first.step - 1}"
        return (
            f"{what(site)} differs when the step begins, although all values recorded before are equal: {since}, "
            "one run drew random numbers that the other did not (an extra random draw)."
        )


def _goes_on(scene: Scene) -> bool:
    """Whether one run begins where the other has already been."""
    sides = scene.facts.sides
    return scene.first.step != scene.first.step_b or sides.a.entry(0).step != sides.b.entry(0).step


def unseeded(scene: Scene) -> tuple[str, ...]:
    """Generators that both runs began to draw from, unseeded, in the diverging step, or before a state that differs."""
    facts = scene.facts
    if scene.cause.reason == RandomState.word:
        return _began(facts.alignment, facts.before_pair, lambda: facts.pair)
    return _began(facts.alignment, facts.pair, lambda: scene.after)


def _began(alignment: Alignment, now: StepPair | None, after: Callable[[], StepPair | None]) -> tuple[str, ...]:
    """Generators untouched in both runs when one step begins, and drawn from, differently, when the next does."""
    untouched = _with_status(alignment, now, Status.VALUE)
    following = after() if untouched else None
    if following is None:
        return ()
    records = StepRecords(alignment, following)
    drawn = [union for union in _with_status(alignment, following, Status.OBSERVED) if union in untouched]
    return tuple(alignment.fqn[u] for u in drawn if records.checksum(u, "a") != records.checksum(u, "b"))


def _with_status(alignment: Alignment, pair: StepPair | None, status: Status) -> list[int]:
    """Random states of a step that both runs recorded with that status."""
    if pair is None:
        return []
    records = StepRecords(alignment, pair)
    states = map(int, np.flatnonzero(alignment.kind == kind_code(Kind.RNG)))
    return [union for union in states if all(records.status(union, side) is status for side in "ab")]


def unseeded_sentence(scene: Scene) -> str:
    """That a generator was drawn from without a seed, where that is so; it differs between any two processes then."""
    names = [_GENERATORS.get(name, name) for name in unseeded(scene)]
    if not names:
        return ""
    step = scene.first.step - (scene.cause.reason == RandomState.word)
    verb = "is" if len(names) == 1 else "are"
    return (
        f" {' and '.join(names)} {verb} drawn from in step {step} without ever having been seeded, so every process "
        "gets different numbers (capture --seed seeds all generators)."
    )


REASONS = (RandomState(),)
