"""Gathers what a sentence needs from beyond the diverging step: the step after it, the module trees, the manifests."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from introspect_cli.compare.join.rows import StepPair, match
from introspect_cli.compare.reasons.clues import Clues, find_clues
from introspect_cli.compare.reasons.unseeded import unseeded
from introspect_cli.compare.result import Reason

if TYPE_CHECKING:
    from introspect_cli.compare.join.sites import Alignment
    from introspect_cli.compare.rank import RankOutcome


def look_around(a: Any, b: Any, outcome: RankOutcome) -> Clues:
    """What lies around the first divergence of a rank.

    Args:
        a: run a.
        b: run b.
        outcome: the rank's comparison, which found a divergence.
    """
    assert outcome.facts is not None
    assert outcome.first is not None
    assert outcome.cause is not None
    steps = outcome.paired.steps
    step = outcome.first.step
    one, two = a.rank(outcome.rank), b.rank(outcome.rank)
    clues = find_clues(
        outcome.facts,
        outcome.first,
        outcome.cause,
        outcome.previous,
        one.modules,
        two.modules,
        int(steps[0]),
        int((steps < step).sum()),
    )
    pair, alignment = outcome.facts.pair, outcome.facts.alignment
    if outcome.cause.reason is Reason.RNG:
        generators = unseeded(alignment, outcome.previous, lambda: pair)
    else:
        generators = unseeded(alignment, pair, lambda: _step_after(alignment, pair, one, two))
    return replace(clues, children=", ".join(_children(a, b)), unseeded=generators)


def _step_after(alignment: Alignment, pair: StepPair, a: Any, b: Any) -> StepPair | None:
    """The step after, where both runs recorded it."""
    steps = pair.step + 1, pair.step_b + 1
    if steps[0] not in a or steps[1] not in b:
        return None
    return match(alignment, alignment.mask(frozenset(), ()), *steps, a.read(steps[0]), b.read(steps[1]))


def _children(a: Any, b: Any) -> list[str]:
    """What either script ran in processes of its own."""
    told = [run.manifest.get("children") for run in (a, b)]
    return list(dict.fromkeys(str(name) for names in told if isinstance(names, list) for name in names))
