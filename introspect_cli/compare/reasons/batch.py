"""The batch differs, and the random states before it do not: the data pipeline."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, ClassVar

from introspect_cli.compare.reasons.base import Cause, Reason, Scene
from introspect_cli.compare.reasons.evidence import Known, known_of, random_state
from introspect_cli.compare.reasons.words import apart, what
from introspect_cli.records import Kind, Phase

if TYPE_CHECKING:
    from introspect_cli.compare.reasons.facts import Facts
    from introspect_cli.compare.result import Divergence

_DATA = frozenset({Phase.DATA})


class Batch(Reason):
    """What a data loader gives."""

    word = "batch"
    place = "the data pipeline"
    kinds = frozenset({Kind.BATCH})
    weights: ClassVar = {"command": 0.9, "seeds": 0.95}
    names = re.compile(r"seed|worker|batch|shuffle|data|block|seq|sampler|augment", re.IGNORECASE)

    def applies(self, facts: Facts, position: int) -> Cause | None:
        """A batch comes from the loader, the batches before it and the random states."""
        site = facts.sites[position]
        if facts.rng_differs() or site.fqn in facts.carried.loaders or facts.carried.rng:
            return None
        return self.cause(random_state(facts))

    def sentence(self, scene: Scene) -> str:
        """Whether the values are the same in another order, and whether batches before it are equal."""
        text = f"{what(scene.site)} differs{apart(scene.first)}."
        if _same_values(scene.first):
            return f"{text} It holds the same values in a different order: the data was shuffled differently."
        if _earlier_equal(scene):
            return f"{text} Earlier batches are equal: look at the data pipeline (order, workers, augmentation, files)."
        return f"{text} The data differs from the first batch on: order, seed, files or augmentation."


def _earlier_equal(scene: Scene) -> bool:
    """Whether batches of this loader were recorded before, in this step or the last one; they agree then."""
    facts, site = scene.facts, scene.site
    own = facts.unions(Kind.BATCH, _DATA, site.fqn)
    if known_of(facts, own, scene.first.sequence) in {Known.EQUAL, Known.WITHIN}:
        return True
    return scene.steps_before > 0


def _same_values(divergence: Divergence) -> bool:
    a, b = divergence.a, divergence.b
    if a is None or b is None or a.layout != b.layout or a.layout.numel < 2:
        return False
    names = ("min", "max", "zeros", "nans", "posinfs", "neginfs")
    if not a.stats or any(a.stats.get(name) != b.stats.get(name) for name in names) or a.stats["min"] == a.stats["max"]:
        return False
    return all(
        abs(a.stats.get(name, 0.0) - b.stats.get(name, 0.0)) <= 1e-9 * max(abs(a.stats.get(name, 0.0)), 1e-30)
        for name in ("mean", "var")
    )


REASONS = (Batch(),)
